"""The settings `slot` and `compact` against slow references; models of other kinds, kernels and dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from budgeted import distinct, draw, never_stop, read, small, task
from torch import Tensor
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from cfkv.errors import CfkvError
from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Outcome, Task
from cfkv.models import compat
from cfkv.models.budget_cache import BudgetCache, Reads
from cfkv.models.decode import generate_greedy
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import make_policy, policy_kinds
from cfkv.policies._budget import Budget

Tiny = Callable[[str, str], LoadedModel]
PROMPT, LENGTH, SLOTS = 20, 60, 28


def turned(vectors: Tensor, places: Tensor, loaded: LoadedModel) -> Tensor:
    """Vectors [..., N, D] turned by the angles of `places` [N]: halves (x, y) -> (x cos - y sin, y cos + x sin)."""
    half = vectors.shape[-1] // 2
    theta = loaded.model.config.rope_parameters["rope_theta"]
    angles = places[:, None].double() * theta ** (-torch.arange(half).double() / half)
    x, y = vectors.double().split(half, dim=-1)
    return torch.cat([x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()], -1).float()


class ByHand:
    """Batch 1 with a cache of the library that is rebuilt at each step; kept tokens are the same in all layers."""

    def __init__(self, loaded: LoadedModel, ids: Sequence[int], prompt: int) -> None:
        self.loaded, self.ids = loaded, list(ids)
        self.cache, self.kept = DynamicCache(), list(range(prompt))
        self.told = list(range(prompt))  # the rotary position that each kept key has
        self.logits: list[Tensor] = []
        with torch.inference_mode():
            compat.forward(loaded.model, torch.tensor([self.ids[:prompt]]), self.cache)

    def step(self, place: int) -> None:
        """Feed the next token, told that it is at `place`."""
        step = max(self.kept) + 1
        with torch.inference_mode():
            logits = compat.forward(
                self.loaded.model,
                torch.tensor([[self.ids[step]]]),
                self.cache,
                positions=torch.tensor([[place]]),
                attention_mask=torch.ones(1, len(self.kept) + 1, dtype=torch.long),
            )
        self.logits.append(logits[0, -1])
        self.kept.append(step)
        self.told.append(place)

    def keep(self, tokens: Sequence[int], *, compact: bool) -> None:
        """Build the cache anew with these tokens, their keys moved together if asked."""
        places = torch.tensor([self.kept.index(token) for token in tokens])
        before = torch.tensor(self.told)[places]
        after = torch.arange(len(tokens)) if compact else before
        cache = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            keys, values = (tensor[:, :, places] for tensor in (layer.keys, layer.values))
            cache.update(turned(keys, after - before, self.loaded), values, index)
        self.cache, self.kept, self.told = cache, list(tokens), after.tolist()


def followed(own: Task) -> tuple[Outcome, Tensor]:
    """The outcome, and the logits of all steps."""
    steps: list[Tensor] = []
    (outcome,) = decode([own], 1, watch=lambda index, step, logits: steps.append(logits.clone()))
    assert outcome.status == "ok", outcome.reason
    return outcome, torch.stack(steps)


@pytest.mark.parametrize("positions", ["absolute", "slot", "compact"])
@pytest.mark.parametrize("name", ["random", "streaming_llm", "h2o_global", "epikv_raw", "raas_epikv"])
def test_positions_by_hand(name: str, positions: str, make_tiny: Tiny) -> None:
    """The cache is rebuilt by the keep sets of the run; that they are the policy's own is tested elsewhere."""
    loaded, policy = make_tiny("llama", "sdpa"), small(name)
    ids = distinct(loaded, LENGTH)
    for prompt in (PROMPT, 32) if name in ("streaming_llm", "h2o_global") else (PROMPT,):
        own = task(
            read(loaded, [policy], ids, prompt, prompt=prompt), 0, ids, Budget(slots=SLOTS), record=True
        )
        outcome, found = followed(dataclasses.replace(own, positions=positions))
        sets = {keep.step: keep.kept for keep in outcome.keep_sets}
        assert len(sets) == LENGTH - max(prompt - 1, SLOTS)
        reference = ByHand(loaded, ids, prompt)
        if prompt in sets:
            reference.keep(sets[prompt], compact=positions == "compact")
        for step in range(prompt, LENGTH):
            reference.step(step if positions == "absolute" else len(reference.kept))
            if step + 1 in sets:
                reference.keep(sets[step + 1], compact=positions == "compact")
        expected = torch.stack(reference.logits)
        gap = float((found - expected).abs().max())
        print(f"{name}, {positions}: largest difference {gap:.1e}")
        assert gap < 1e-4
    if positions != "absolute":
        absolute = followed(own)[1]
        assert float((found - absolute).abs().max()) > 1e-3  # or the setting would show nothing


def test_streaming_llm_rerotated_from_scratch(make_tiny: Tiny) -> None:
    """Four sinks and the newest tokens at 0, 1, ...: StreamingLLM generates from a prompt above the budget."""
    loaded, policy = make_tiny("llama", "sdpa"), make_policy("streaming_llm_rerotated")
    new, prompt, slots = 30, 40, 24
    ids = distinct(loaded, prompt, seed=2)
    own = task(
        read(loaded, [policy], ids, prompt, prompt=prompt), 0, ids, Budget(slots=slots), max_new_tokens=new
    )
    outcome, found = followed(own)
    reference = ByHand(loaded, ids, prompt)
    with torch.inference_mode():
        first = int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax())
    reference.keep([*range(4), *range(prompt - slots + 4, prompt)], compact=True)
    reference.ids.append(first)
    for step in range(prompt, prompt + new - 1):
        assert reference.told == list(range(slots))
        reference.step(slots)
        reference.ids.append(int(reference.logits[-1].argmax()))
        reference.keep([*range(4), *range(step + 1 - slots + 4, step + 1)], compact=True)
    assert outcome.min_margin > 1e-4
    assert outcome.token_ids == reference.ids[prompt:]
    torch.testing.assert_close(found, torch.stack(reference.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("positions", ["slot", "compact"])
@pytest.mark.parametrize(
    ("name", "options"), [("h2o", {"simulate": True}), ("ada_kv", {}), ("pyramidkv", {}), ("chunkkv", {})]
)
def test_other_positions_need_one_length(
    name: str, options: dict[str, Any], positions: str, llama: LoadedModel
) -> None:
    """Where masks simulate or layers differ in length, no number is every layer's next place."""
    ids = draw(llama, LENGTH)
    own = task(read(llama, [small(name)], ids, 50), 0, ids, Budget(slots=44), positions=positions, **options)
    with pytest.raises(CfkvError, match=f"policy {name} .*--positions absolute"):
        decode([own], 1)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "phi3", "qwen2"])
def test_eager_equals_sdpa(family: str, make_tiny: Tiny) -> None:
    """Also with sliding windows of 8, which every budget here is above."""
    names = [
        "h2o",
        "snapkv_decode",
        "manifoldkv_prerotary",
        "epikv",
        "random",
        "tova",
        "streaming_llm_rerotated",
    ]
    found = []
    for kernel in ("sdpa", "eager"):
        loaded = make_tiny(family, kernel)
        ids = distinct(loaded, LENGTH)
        reading = read(loaded, [small(name) for name in names], ids, 44, prompt=16)
        tasks = [
            task(reading, index, ids, Budget(slots=32), record=True, max_new_tokens=8)
            for index in range(len(names))
        ]
        found.append(decode(tasks, 4))
    for name, sdpa, eager in zip(names, *found, strict=True):
        assert sdpa.status == "ok"
        assert sdpa.evictions > 0, name
        assert sdpa.keep_sets == eager.keep_sets, name
        assert sdpa.token_ids == eager.token_ids, name
        assert sdpa.min_margin == pytest.approx(eager.min_margin, abs=1e-4)


EXTRAS: dict[str, tuple[type[Any], Any, str]] = {
    "soft caps": (
        Gemma2ForCausalLM,
        Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=0,
        ),
        "attention of layers 0-1 has soft-capped logits",
    ),
    "sinks": (
        GptOssForCausalLM,
        GptOssConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
            pad_token_id=0,
        ),
        "attention of layers 0-1 has attention sinks",
    ),
}


@pytest.mark.parametrize("what", EXTRAS)
def test_attention_with_more_than_dot_products_is_refused(
    what: str, wrap_model: Callable[..., LoadedModel], word_tokenizer: Any
) -> None:
    kind, config, message = EXTRAS[what]
    loaded = wrap_model(
        "extra", kind._from_config(config, attn_implementation="eager").eval(), word_tokenizer
    )
    policy = make_policy("streaming_llm")
    reading = read(loaded, [policy], range(9, 29), 20)
    with pytest.raises(CfkvError, match=f"extra cannot be run under a budget: {message}"):
        decode([task(reading, 0, range(9, 29), Budget(slots=8), max_new_tokens=4)], 1)


@pytest.fixture
def half(make_tiny: Tiny) -> LoadedModel:
    """A tiny model in bfloat16."""
    loaded = make_tiny("qwen3", "sdpa")
    model = type(loaded.model)._from_config(
        loaded.model.config, attn_implementation="sdpa", dtype=torch.bfloat16
    )
    model.load_state_dict(loaded.model.state_dict())
    return dataclasses.replace(loaded, model=model.eval(), dtype=torch.bfloat16)


def test_differences_of_hidden_states_are_not_rounded(half: LoadedModel) -> None:
    """As where a text is read at once: in float32, of states in bfloat16."""
    cache = BudgetCache(half, 1, 4, Reads(hidden=True))
    before, new = torch.tensor([1.0, 256.0]).bfloat16(), torch.tensor([1.0 + 2**-7, 0.5]).bfloat16()
    states = torch.zeros(2, half.shape.hidden_size, dtype=torch.bfloat16)
    states[0, :2], states[1, :2] = before, new
    cache.load(
        0,
        keys=cache.keys[:, 0, :, :1].clone(),
        values=cache.values[:, 0, :, :1].clone(),
        positions=torch.tensor([0]),
        hidden=states[0].expand(half.shape.num_layers, -1),
    )
    cache._hidden_tap(0, states[1][None, None])
    # 2^-7 and 255.5, which bfloat16 rounds to 256: eight bits reach from 256 down to 1
    assert float(cache.hidden_diff[0, 0]) == pytest.approx((255.5**2 + 2**-14) ** 0.5, rel=1e-6)


def test_bfloat16(half: LoadedModel) -> None:
    """Every policy runs; with room for all, the tokens are those of the model's own cache but for ties."""
    ids, names = distinct(half, LENGTH), policy_kinds.names()
    policies = [small(name) for name in names]
    readings = {stop: read(half, policies, ids, stop, prompt=16) for stop in (16, 52)}
    tasks = [
        task(
            readings[52 if policy.schedule.kind == "once" else 16], index, ids, Budget(slots=40), record=True
        )
        for index, policy in enumerate(policies)
    ]
    for name, outcome in zip(names, decode(tasks, 100), strict=True):
        assert outcome.status == "ok", (name, outcome.reason)
        assert (outcome.evictions > 0) == (name != "full"), name
        assert len(outcome.token_ids) == 1
    (plain,) = generate_greedy(half, [ids[:20]], max_new_tokens=[12], stops=[never_stop], chunk_size=64)
    whole = read(half, [make_policy("h2o")], ids, 20)
    (own,) = decode([task(whole, 0, ids[:20], Budget(slots=99), max_new_tokens=12)], 1)
    same = [mine == theirs for mine, theirs in zip(own.token_ids, plain.token_ids, strict=True)]
    assert all(same) or plain.min_margin < 0.1
