"""Hiding entries on some layers and KV heads, against an attention that leaves their keys out one head at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.labels._packed import Counterfactual, literal_logprobs, packed_logprobs
from cfkv.labels._replay import Replay
from cfkv.labels._scope import Scope
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.slots import SlotCache

STEP = 30
SPANS = [(4, 12), (20, 29)]


def words(loaded: LoadedModel, count: int) -> list[int]:
    """Random words and a short closing."""
    ids = torch.randint(9, 100, (count,), generator=torch.Generator().manual_seed(5)).tolist()
    return [*ids, *loaded.tokenizer.encode("</think> \\boxed{")]


class LeavingOut:
    """Attention by hand: on layer and KV head given, the keys of `span` do not exist for queries from STEP on."""

    def __init__(self, layers: Sequence[int], kv_heads: Sequence[int], loaded: LoadedModel) -> None:
        self.layers, self.kv_heads, self.shape = layers, kv_heads, loaded.shape
        self.span: tuple[int, int] = (0, 0)
        self.calls = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        layer = self.calls % self.shape.num_layers
        self.calls += 1
        mask, scale = options.get("attn_mask"), options.get("scale")
        heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
        output = torch.zeros_like(query)
        for head in range(heads):
            kv_head = head * self.shape.num_kv_heads // heads
            place = head if key.shape[1] == heads else kv_head
            for row in range(queries):
                at = keys - queries + row
                seen = [k for k in range(at + 1) if mask is None or bool(mask[0, 0, row, k])]  # type: ignore[index]
                if layer in self.layers and kv_head in self.kv_heads and at >= STEP:
                    seen = [k for k in seen if not self.span[0] <= k < self.span[1]]
                scores = key[0, place, seen] @ query[0, head, row] * scale
                output[0, head, row] = scores.softmax(0) @ value[0, place, seen]
        return output


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
@pytest.mark.parametrize(("layers", "kv_heads"), [("1", "all"), ("all", "0"), ("0-1", "1"), ("0", "0,1")])
def test_scope_is_leaving_keys_out(
    make_tiny: Callable[[str, str], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    layers: str,
    kv_heads: str,
) -> None:
    """Probability of a given answer under a knockout in the scope: packed, literal, and by hand."""
    loaded = make_tiny(family, "sdpa")
    context, answer = words(loaded, STEP), [20, 9, 31]
    scope = Scope.parse(layers, kv_heads, loaded.shape)
    replay = Replay(
        loaded=loaded,
        context=tuple(context),
        answer=tuple(answer),
        prefix="\\boxed{",
        max_new_tokens=4,
        chunk_size=512,
        memory=2**31,
        scope=scope,
    )
    rows = [Counterfactual(STEP, tuple(context[STEP:]), (span,)) for span in SPANS]
    found, literal = replay.fast(rows, answer), [replay.literal(row) for row in rows]
    whole = dataclasses.replace(replay, scope=Scope.parse("all", "all", loaded.shape))
    everywhere = whole.fast(rows, answer)
    by_hand = LeavingOut(scope.layers, scope.kv_heads, loaded)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", by_hand)
    largest, apart = 0.0, list[float]()
    for span, mine, slow, wide in zip(SPANS, found, literal, everywhere, strict=True):
        by_hand.span = span
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([[*context, *answer]])).logits[0, len(context) - 1 : -1]
        nll = float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)))
        largest = max(largest, abs(mine.nll - nll), abs(slow.nll - nll))
        assert mine.token_ids == slow.token_ids
        apart.append(abs(wide.nll - mine.nll))
    print(f"{family} {scope.name}: largest difference of nll {largest:.1e}")
    assert largest < 1e-5
    assert max(apart) > 1e-3  # the scope matters


def test_packed_is_literal_under_a_scope(tiny: LoadedModel) -> None:
    """Single blocks and a pair, on all families."""
    ids = words(tiny, STEP + 5)
    cache = SlotCache(tiny.shape.num_layers, 40)
    with torch.inference_mode():
        compat.forward(tiny.model, torch.tensor([ids[:STEP]]), cache)
    scope = Scope.parse("1", "1", tiny.shape)
    removals = [[], [(3, 5)], [(28, 29)], [(3, 5), (28, 29)]]
    packed = packed_logprobs(tiny, cache, ids[STEP : STEP + 5], removals, scope)
    literal = [literal_logprobs(tiny, cache, ids[STEP : STEP + 5], removal, scope) for removal in removals]
    largest = float((packed - torch.stack(literal)).abs().max())
    print(f"{tiny.name}: {largest:.1e}")
    assert largest < 1e-5
    assert float((packed[2] - packed[0]).abs().max()) > 1e-4  # near enough for sliding layers


def test_every_layer_and_head_is_the_whole_cache(llama: LoadedModel) -> None:
    """Spelt out, the scope gives the numbers of `all`, where entries are cut out of the cache."""
    ids = words(llama, STEP + 5)
    cache = SlotCache(llama.shape.num_layers, 40)
    with torch.inference_mode():
        compat.forward(llama.model, torch.tensor([ids[:STEP]]), cache)
    spelt = Scope.parse(f"0-{llama.shape.num_layers - 1}", "0,1", llama.shape)
    whole = Scope.parse("all", "all", llama.shape)
    assert not spelt.everywhere
    first, second = (
        literal_logprobs(llama, cache, ids[STEP : STEP + 4], [(3, 9)], scope) for scope in (spelt, whole)
    )
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def test_masks_are_back_after_an_exception(llama: LoadedModel) -> None:
    """A forward that fails leaves no hook behind."""
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    before = [len(layer._forward_pre_hooks) for layer in compat.decoder_layers(llama.model)]
    with pytest.raises(IndexError):
        compat.forward(
            llama.model,
            torch.tensor([[10**6] * 3]),
            compat.new_cache(),
            attention_mask=mask,
            layer_masks={0: mask},
        )
    assert [len(layer._forward_pre_hooks) for layer in compat.decoder_layers(llama.model)] == before


def test_names_of_scopes(llama: LoadedModel) -> None:
    """As they stand in the tables."""
    shape = llama.shape
    assert (shape.num_layers, shape.num_kv_heads) == (3, 2)
    assert Scope.parse("all", "all", shape).name == "all"
    assert Scope.parse("0-1", "all", shape).name == "layers 0-1"
    scope = Scope.parse("1", "0,1", shape)
    assert (scope.layers, scope.kv_heads, scope.name) == ((1,), (0, 1), "layers 1, kv_heads 0,1")


@pytest.mark.parametrize(
    ("layers", "kv_heads", "message"),
    [
        ("5", "all", r"--layers '5': 5 is not within this model's layers 0-2"),
        ("1-0", "all", r"--layers '1-0': 1-0 is not within"),
        ("all", "0-7", r"--kv-heads '0-7': 0-7 is not within this model's KV heads 0-1"),
        ("first", "all", r"--layers 'first': 'first' is no index or range; legal are all, 4-11, or 0,2,5-7"),
        ("", "all", r"--layers ''"),
        ("0,", "all", r"--layers '0,'"),
    ],
)
def test_scopes_that_are_none(llama: LoadedModel, layers: str, kv_heads: str, message: str) -> None:
    """What was wrong, and what is legal."""
    with pytest.raises(CfkvError, match=message):
        Scope.parse(layers, kv_heads, llama.shape)
