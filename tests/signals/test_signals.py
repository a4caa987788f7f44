"""The contract of a signal, for every registered signal on every family, against a dense reference."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dense import Dense, dense
from formulas import ATTENTION, HIDDEN, LAYER, WHOLE, norm, reference, variance
from torch import Tensor

from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.signals._base import TO_END, Observation, Signal, signal_kinds
from cfkv.signals._probe import SignalValues, _Pass, probe
from cfkv.signals.lag_key import LagKey
from cfkv.signals.lag_value import LagValue
from cfkv.signals.lagkv import Lagkv

LENGTH = 70
NAMES = signal_kinds.names()
FIELDS = {field.name for field in dataclasses.fields(Observation)} - {"start", "stop", "length"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of LagKV that fit several times into a short trace."""
    for signal in (LagKey, LagValue):
        monkeypatch.setattr(signal, "chunk", 16)
    for name, value in (("partition", 16), ("sinks", 4), ("horizon", 31)):
        monkeypatch.setattr(Lagkv, name, value)


@pytest.fixture(autouse=True)
def sharp_attention(
    make_tiny: Callable[[str, str], LoadedModel],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random weights attend to everything alike; with a larger scale some keys are read strongly, others not."""
    for name in {"tiny", "llama"} & set(request.fixturenames):
        family = request.getfixturevalue(name).name.removeprefix("tiny-")
        for kernel in ("sdpa", "eager"):
            for layer in make_tiny(family, kernel).model.model.layers:
                monkeypatch.setattr(layer.self_attn, "scaling", 4 * layer.self_attn.scaling)


def draw(loaded: LoadedModel, seed: int = 3, length: int = LENGTH) -> list[int]:
    """Digits, markers and words."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, loaded.shape.vocabulary, (length,), generator=generator).tolist()


def run(
    loaded: LoadedModel, ids: Sequence[int], chunk: int = 512, names: Sequence[str] = NAMES, **options: Any
) -> SignalValues:
    return probe(loaded, ids, [signal_kinds.get(name)() for name in names], chunk_size=chunk, **options)


def gap(first: np.ndarray, second: np.ndarray) -> float:
    """Largest difference relative to the second's scale; NaN must stand at the same places."""
    assert first.shape == second.shape
    assert (np.isnan(first) == np.isnan(second)).all()
    scale = max(1.0, float(np.nanmax(np.abs(second))))
    return float(np.nanmax(np.abs(first - second))) / scale


def worst(gaps: dict[Any, float]) -> tuple[Any, float]:
    return max(gaps.items(), key=lambda item: item[1])


@pytest.fixture
def textbook(make_tiny: Callable[[str, str], LoadedModel], tiny: LoadedModel) -> Dense:
    """The dense run of the same weights with the eager kernel."""
    return dense(make_tiny(tiny.name.removeprefix("tiny-"), "eager"), draw(tiny))


def test_every_signal_has_a_reference() -> None:
    assert set(NAMES) == {*HIDDEN, *LAYER, *ATTENTION, *WHOLE}, (
        "a new signal needs a textbook formula in formulas.py"
    )


@pytest.mark.parametrize("name", NAMES)
def test_declarations(name: str) -> None:
    signal = signal_kinds.get(name)
    assert signal.name == name
    assert re.fullmatch(r"[a-z]\w*", signal.group)
    assert signal.observes
    assert set(signal.observes) <= FIELDS
    assert all(len(text.strip()) > 3 for text in (signal.source, inspect.getdoc(signal) or ""))
    assert signal.unit.strip()
    assert signal.__doc__ != signal.__mro__[1].__doc__
    assert 0 <= signal.horizon <= TO_END
    assert signal.version >= 1
    assert not (signal.embedding and "hidden_CE" not in signal.observes)
    assert not (signal.heads and not signal.layered)


def test_all_layers_are_there(tiny: LoadedModel) -> None:
    values = run(tiny, draw(tiny))
    for name in NAMES:
        signal = signal_kinds.get(name)
        first = -1 if signal.embedding else 0
        layers = set(range(first, tiny.shape.num_layers)) if signal.layered else {None}
        assert {layer for own, layer in values if own == name} == layers
        heads = tiny.shape.num_kv_heads if signal.heads else 1
        for layer in layers:
            assert values[name, layer].shape == (heads, LENGTH)
            assert values[name, layer].dtype == np.float32


def test_signals_equal_the_dense_reference(tiny: LoadedModel, textbook: Dense) -> None:
    values, expected = run(tiny, draw(tiny), chunk=64), reference(textbook)
    assert set(values) == set(expected)
    place, largest = worst({key: gap(values[key], expected[key]) for key in expected})
    print(f"{tiny.name}: largest relative difference {largest:.2e} at {place}")
    assert largest < 1e-5


def test_last_layer_is_not_the_normed_one(tiny: LoadedModel) -> None:
    """The trap: transformers' last hidden state is after the final norm."""
    ids, last = draw(tiny), tiny.shape.num_layers - 1
    normed = tiny.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    found = run(tiny, ids, names=["hidden_norm"])["hidden_norm", last]
    assert np.abs(found - norm(normed.double().numpy())[None]).max() > 0.1


def test_keys_are_rotated_textbook_llama(llama: LoadedModel) -> None:
    """Layer 0 by hand: projection of the normed embedding, rotated by position; norms do not see it."""
    ids = draw(llama)
    layer, head_dim = llama.model.model.layers[0], llama.shape.head_dim
    with torch.no_grad():
        normed = layer.input_layernorm(llama.model.model.embed_tokens(torch.tensor(ids)))
        keys = layer.self_attn.k_proj(normed).view(LENGTH, -1, head_dim).double().numpy()
    angles = np.arange(LENGTH)[:, None] / 10000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    front, back = keys[..., : head_dim // 2], keys[..., head_dim // 2 :]
    rotated = np.concatenate([front * cosine - back * sine, back * cosine + front * sine], axis=-1)
    values = run(llama, ids)
    assert gap(values["key_variance", 0], variance(rotated).T) < 1e-5
    assert gap(values["key_norm", 0], norm(keys).T) < 1e-5
    assert gap(values["key_variance_prerotary", 0], variance(keys).T) < 1e-5
    assert gap(values["key_variance", 0], variance(keys).T) > 1e-3


def test_chunk_size_changes_nothing(tiny: LoadedModel) -> None:
    ids = draw(tiny)
    whole = run(tiny, ids)
    gaps = {}
    for chunk in (1, 7, 64):
        pieces = run(tiny, ids, chunk)
        assert set(pieces) == set(whole)
        gaps |= {(*key, chunk): gap(pieces[key], whole[key]) for key in whole}
    print(f"{tiny.name}: {worst(gaps)}")
    assert worst(gaps)[1] < 1e-5


@pytest.mark.parametrize("place", [1, 30, 69])
def test_later_tokens_change_nothing_before(tiny: LoadedModel, place: int) -> None:
    """A value at t depends on no token after t + horizon."""
    ids = draw(tiny)
    other = [*ids[:place], *(9 + (token - 9 + 1) % 91 for token in ids[place:])]
    bounded = [name for name in NAMES if signal_kinds.get(name).horizon < TO_END]
    before, after = run(tiny, ids, 16, bounded), run(tiny, other, 16, bounded)
    largest = 0.0
    for key, values in before.items():
        change = np.abs(np.nan_to_num(values) - np.nan_to_num(after[key]))
        own = max(0, place - signal_kinds.get(key[0]).horizon)
        largest = max(largest, float(change[:, :own].max(initial=0)))
    print(f"{tiny.name} from {place}: {largest:.2e}")
    assert largest < 1e-6


def test_signals_see_a_change(tiny: LoadedModel) -> None:
    """Every signal that reads the model has other values for other tokens."""
    ids = draw(tiny)
    before, after = run(tiny, ids), run(tiny, draw(tiny, seed=4))
    for key, values in before.items():
        if signal_kinds.get(key[0]).group != "position":
            assert not np.array_equal(values, after[key], equal_nan=True), key


def test_a_signal_alone_has_the_values_that_it_has_among_all(llama: LoadedModel) -> None:
    """It reads nothing that only others ask for."""
    ids = draw(llama)
    together = run(llama, ids, 16)
    for name in NAMES:
        for key, values in run(llama, ids, 16, [name]).items():
            assert np.array_equal(values, together[key], equal_nan=True), key


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_traces(llama: LoadedModel, length: int) -> None:
    for chunk in (1, 512):
        for key, values in run(llama, draw(llama, length=length), chunk).items():
            assert values.shape[1] == length, key
            assert not np.isinf(values).any(), key


def forwards(loaded: LoadedModel, ids: list[int], names: Sequence[str], monkeypatch: Any) -> list[Tensor]:
    """The logits of each forward of a probe, before anything overwrites them."""
    right, seen = compat.forward, []

    def spy(*arguments: Any, **options: Any) -> Tensor:
        logits = right(*arguments, **{**options, "logits_to_keep": 0})
        seen.append(logits.clone())
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(compat, "forward", spy)
        run(loaded, ids, 16, names)
    return seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_bit_identical(
    tiny: LoadedModel, make_tiny: Callable[..., LoadedModel], attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = make_tiny(tiny.name.removeprefix("tiny-"), attention)
    ids, cache = draw(loaded), compat.new_cache()
    probed = forwards(loaded, ids, NAMES, monkeypatch)
    with torch.inference_mode():
        plain = [
            compat.forward(loaded.model, torch.tensor([ids[start : start + 16]]), cache)
            for start in range(0, LENGTH, 16)
        ]
    assert len(probed) == len(plain) == 5
    assert all(torch.equal(one, other) for one, other in zip(probed, plain, strict=True))


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors(v)]
    return []


def held(loaded: LoadedModel, signal: Signal, length: int) -> dict[int | None, int]:
    """Bytes that the states of a signal hold after a trace, by layer, with what views keep alive."""
    ids = draw(loaded, length=length)
    pass_ = _Pass(loaded, ids, [signal], (0, length), None)
    with torch.inference_mode(), pass_.taps():
        for start in range(0, length, 35):
            pass_.advance(start, start + 35)
    found = {}
    for (_, layer), state in pass_.states.items():
        storage = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(state)}
        found[layer] = sum(storage.values())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_state_keeps_numbers_and_not_vectors(llama: LoadedModel, name: str) -> None:
    """At most two numbers a token and query head, and a few vectors whatever the length."""
    short, long = (held(llama, signal_kinds.get(name)(), length) for length in (70, 210))
    for layer, size in long.items():
        assert size - short[layer] <= 4 * 140 * 2 * llama.shape.num_heads
        assert size <= 4 * (210 * 2 * llama.shape.num_heads + 8 * llama.shape.hidden_size)


def test_wrong_observation_is_the_engines_mistake() -> None:
    for name in NAMES:
        signal = signal_kinds.get(name)()
        with pytest.raises(RuntimeError, match="the observation has no"):
            signal.update(signal.init(), Observation(start=0, stop=4, length=4))
