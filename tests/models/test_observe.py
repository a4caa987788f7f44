"""Taps read every layer and change nothing; the self-check passes on good models and fails on broken ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from cfkv.errors import CfkvError
from cfkv.models import compat, selfcheck
from cfkv.models.loading import LoadedModel
from cfkv.models.observe import (
    EMBEDDING_LAYER,
    AttentionCall,
    observing_attention,
    tapping_hidden,
    tapping_parts,
)

LENGTH = 20


def draw(loaded: LoadedModel) -> Tensor:
    return torch.randint(9, loaded.shape.vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def count_hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def tapped(loaded: LoadedModel, ids: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    seen: dict[int, Tensor] = {}
    with tapping_hidden(loaded.model, lambda layer, output: seen.__setitem__(layer, output.clone())):
        logits = compat.forward(loaded.model, ids, compat.new_cache())
    return seen, logits


def test_taps_see_every_layer_before_the_final_norm(tiny: LoadedModel) -> None:
    ids = draw(tiny)
    seen, _ = tapped(tiny, ids)
    last = tiny.shape.num_layers - 1
    assert list(seen) == list(range(EMBEDDING_LAYER, last + 1))  # in the order of the layers
    states = tiny.model(ids, output_hidden_states=True).hidden_states
    assert len(states) == last + 2
    gaps = {layer: float((seen[layer] - states[layer + 1]).abs().max()) for layer in range(-1, last)}
    print(f"{tiny.name}: largest {max(gaps.values()):.2e}")
    assert max(gaps.values()) < 1e-5
    before: list[Tensor] = []
    handle = tiny.model.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    tiny.model(ids)
    handle.remove()
    assert float((seen[last] - before[0]).abs().max()) < 1e-5
    assert float((tiny.model.model.norm(seen[last]) - states[-1]).abs().max()) < 1e-5
    assert float((seen[last] - states[-1]).abs().max()) > 0.1  # the trap: the last entry is normed


def test_taps_leave_logits_bit_identical(tiny: LoadedModel) -> None:
    ids = draw(tiny)
    _, logits = tapped(tiny, ids)
    assert torch.equal(logits, compat.forward(tiny.model, ids, compat.new_cache()))


def test_hooks_are_gone_afterwards(llama: LoadedModel) -> None:
    ids = draw(llama)
    before = count_hooks(llama.model)  # transformers leaves its own after output_hidden_states
    with tapping_hidden(llama.model, lambda layer, output: None):
        assert count_hooks(llama.model) == before + llama.shape.num_layers + 1
    assert count_hooks(llama.model) == before

    def broken(layer: int, output: Tensor) -> None:
        raise ArithmeticError(f"layer {layer}")

    with pytest.raises(ArithmeticError, match="layer -1"), tapping_hidden(llama.model, broken):
        llama.model(ids)
    assert count_hooks(llama.model) == before


def registered() -> set[str]:
    return {*AttentionInterface().keys(), *AttentionMaskInterface().keys()}


def implementations(model: nn.Module) -> set[str | None]:
    return {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_observed_attention_is_the_models_own(
    make_tiny: Callable[..., LoadedModel], tiny: LoadedModel, attention: str
) -> None:
    """Bit-identical logits on padded rows too, and what is seen gives the weights that eager returns."""
    loaded = make_tiny(tiny.name.removeprefix("tiny-"), attention)
    ids, padding = draw(loaded), torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, :5] = 0
    plain = loaded.model(ids, attention_mask=padding).logits
    calls: list[AttentionCall] = []
    with observing_attention(loaded.model, calls.append):
        assert implementations(loaded.model) == {compat.OBSERVE}
        observed = loaded.model(ids, attention_mask=padding).logits
    assert torch.equal(plain, observed)
    assert [call.layer for call in calls] == list(range(loaded.shape.num_layers))
    eager = make_tiny(tiny.name.removeprefix("tiny-"), "eager").model
    weights = eager(ids, attention_mask=padding, output_attentions=True).attentions
    for call, expected in zip(calls, weights, strict=True):
        keys = call.keys.repeat_interleave(call.queries.shape[1] // call.keys.shape[1], dim=1)
        scores = call.queries @ keys.transpose(2, 3) * call.scaling
        mask = call.mask if call.mask.dtype == torch.bool else call.mask == 0
        found = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        own = padding[:, None, :, None].bool().expand_as(found)  # padded rows attend to nothing that matters
        assert torch.allclose(found[own], expected[own], atol=1e-6)


def test_observing_leaves_nothing_behind(llama: LoadedModel) -> None:
    ids, before, hooks = draw(llama), registered(), count_hooks(llama.model)

    def broken(call: AttentionCall) -> None:
        raise ArithmeticError(f"layer {call.layer}")

    with observing_attention(llama.model, lambda call: None, rotary=True):
        assert registered() == {*before, compat.OBSERVE}
        with (
            pytest.raises(RuntimeError, match="do not nest"),
            observing_attention(llama.model, lambda call: None),
        ):
            pass
        assert registered() == {*before, compat.OBSERVE}  # the inner one took nothing of the outer one's
    with pytest.raises(ArithmeticError, match="layer 0"), observing_attention(llama.model, broken):
        llama.model(ids)
    assert registered() == before
    assert implementations(llama.model) == {"sdpa"}
    assert count_hooks(llama.model) == hooks


def test_parts_are_the_modules_outputs(tiny: LoadedModel) -> None:
    ids, seen, hooks = draw(tiny), {}, count_hooks(tiny.model)
    with (
        tapping_parts(
            tiny.model, "attention", lambda layer, out: seen.__setitem__(("attention", layer), out)
        ),
        tapping_parts(tiny.model, "mlp", lambda layer, out: seen.__setitem__(("mlp", layer), out)),
        tapping_hidden(tiny.model, lambda layer, out: seen.__setitem__(("hidden", layer), out)),
    ):
        tiny.model(ids)
    assert count_hooks(tiny.model) == hooks
    for index, layer in enumerate(tiny.model.model.layers):
        attention, mlp = seen["attention", index], seen["mlp", index]
        if hasattr(layer, "post_feedforward_layernorm"):  # Gemma3 norms a part before it adds it
            attention, mlp = layer.post_attention_layernorm(attention), layer.post_feedforward_layernorm(mlp)
        total = seen["hidden", index - 1] + attention + mlp
        assert torch.allclose(total, seen["hidden", index], atol=1e-5)


def test_an_unknown_block_is_named() -> None:
    block = nn.ModuleDict({"odd": nn.Linear(2, 2)})
    with pytest.raises(
        CfkvError, match=r"layer 3 \(ModuleDict\) has no mlp module that cfkv knows \(it has odd\)"
    ):
        compat.block_part(block, "mlp", 3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_selfcheck_passes(make_tiny: Callable[..., LoadedModel], tiny: LoadedModel, attention: str) -> None:
    loaded = make_tiny(tiny.name.removeprefix("tiny-"), attention)
    checks = selfcheck.self_check(loaded)
    assert [check.name for check in checks] == list(selfcheck.CHECKS)
    assert all(check.ok for check in checks), checks
    print(f"{tiny.name} {attention}:", ", ".join(f"{check.value:.2e}" for check in checks))
    described = selfcheck.description(loaded)
    assert described["model"]["attn_implementation"] == attention
    assert described["model"]["num_layers"] == loaded.shape.num_layers
    assert len(described["self_check"]) == len(checks)


def test_tolerance_grows_with_the_logits_in_half_precision(llama: LoadedModel) -> None:
    """Of a largest logit of 32: 2 in bfloat16, 0.25 in float16, and 0.001 in float32 whatever its size."""
    whole = torch.tensor([[32.0, -1.0, 0.0]])
    for dtype, bound in ((torch.bfloat16, 2.0), (torch.float16, 0.25), (torch.float32, 0.001)):
        loaded = dataclasses.replace(llama, dtype=dtype)
        for factor, ok in ((0.9, True), (1.1, False)):
            other = whole - torch.tensor([[0.0, 0.0, factor * bound]])
            assert selfcheck._compare(loaded, "n", whole, other, None).ok is ok
    tapped = selfcheck._compare(llama, "n", whole, whole * (1 + 1e-6), "bit-identical logits")
    assert (tapped.ok, tapped.detail) == (False, "bit-identical logits")


def test_selfcheck_passes_on_the_builtin_model(builtin: LoadedModel) -> None:
    assert all(check.ok for check in selfcheck.self_check(builtin))


def test_linear_layers_are_refused_by_name(llama: LoadedModel) -> None:
    kinds = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
    shape = dataclasses.replace(llama.shape, num_layers=4, layer_types=kinds)
    hybrid = dataclasses.replace(llama, shape=shape)
    assert selfcheck.inventory(hybrid) == "4 layers: 1 full_attention, 3 linear_attention"
    assert {check.ok for check in selfcheck.self_check(hybrid)} == {None}
    with pytest.raises(CfkvError, match=r"layers 0-1, 3 are linear_attention"):
        selfcheck.description(hybrid)


def test_shared_layers_are_refused(llama: LoadedModel) -> None:
    shape = dataclasses.replace(llama.shape, shared_layers=2)
    with pytest.raises(CfkvError, match=r"layers 1-2 share their keys and values"):
        selfcheck.description(dataclasses.replace(llama, shape=shape))


def failing(loaded: LoadedModel) -> list[str]:
    return [check.name for check in selfcheck.self_check(loaded) if not check.ok]


TAPS, CHUNKS, MASKS, EVICTED = selfcheck.CHECKS


def test_selfcheck_finds_a_tap_that_changes_the_output(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def meddling(model: nn.Module, tap: Callable[[int, Tensor], None]) -> Iterator[None]:
        def nudge(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            return output * (1 + 1e-5)

        handle = compat.decoder_layers(model)[0].register_forward_hook(nudge)
        with tapping_hidden(model, tap):
            yield
        handle.remove()

    monkeypatch.setattr(selfcheck, "tapping_hidden", meddling)
    assert failing(llama) == [TAPS]
    with pytest.raises(CfkvError, match="tiny-llama.*fails the self-check"):
        selfcheck.description(llama)


def test_selfcheck_finds_a_tap_that_misses_a_layer(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def forgetful(model: nn.Module, tap: Callable[[int, Tensor], None]) -> Iterator[None]:
        with tapping_hidden(model, lambda layer, output: None if layer == 1 else tap(layer, output)):
            yield

    monkeypatch.setattr(selfcheck, "tapping_hidden", forgetful)
    bad = [check for check in selfcheck.self_check(llama) if not check.ok]
    assert [check.name for check in bad] == [TAPS]
    assert bad[0].detail == "taps fired for layers [-1, 0, 2] of [-1, 0, 1, 2]"


def test_selfcheck_finds_a_mask_that_hides_nothing(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compat.masks_from_positions

    def blind(model: nn.Module, queries: Tensor, keys: Tensor, hidden: Tensor | None = None) -> Any:
        return right(model, queries, keys)

    monkeypatch.setattr(compat, "masks_from_positions", blind)
    assert failing(llama) == [EVICTED]


def test_selfcheck_finds_positions_taken_from_the_cache_length(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classic silent bug: after an eviction, new tokens are rotated at their slot."""
    right = compat.forward

    def by_slot(model: nn.Module, ids: Tensor, cache: Any, **options: Any) -> Tensor:
        return right(model, ids, cache, **{**options, "positions": None})

    monkeypatch.setattr(compat, "forward", by_slot)
    assert failing(llama) == [EVICTED]


def test_selfcheck_finds_chunks_that_restart(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = compat.forward

    def restarting(model: nn.Module, ids: Tensor, cache: Any, **options: Any) -> Tensor:
        options.setdefault("positions", torch.arange(ids.shape[1])[None])
        return right(model, ids, cache, **options)

    monkeypatch.setattr(compat, "forward", restarting)
    assert failing(llama) == [CHUNKS]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_selfcheck_finds_a_wrong_window(
    family: str, make_tiny: Callable[[str, str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sliding window off by three passes the eviction check, whose two sides share the mask."""
    loaded = make_tiny(family, "sdpa")
    right = compat.masks_from_positions

    def narrow(model: Any, queries: Tensor, keys: Tensor, hidden: Tensor | None = None) -> Any:
        window = model.config.sliding_window
        monkeypatch.setattr(model.config, "sliding_window", window - 3)
        try:
            return right(model, queries, keys, hidden)
        finally:
            monkeypatch.setattr(model.config, "sliding_window", window)

    assert failing(loaded) == []
    monkeypatch.setattr(compat, "masks_from_positions", narrow)
    assert MASKS in failing(loaded)
