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
from torch import Tensor
from transformers import DynamicCache

from cfkv.models.loading import LoadedModel
from cfkv.signals._base import Observation, Signal, signal_kinds
from cfkv.signals._probe import SignalValues, probe

LENGTH = 70
NAMES = signal_kinds.names()
DIFFS = {"hidden_diff", "hidden_cosine_diff"}


def draw(loaded: LoadedModel, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, loaded.shape.vocabulary, (LENGTH,), generator=generator).tolist()


def run(
    loaded: LoadedModel, ids: Sequence[int], chunk: int = 512, names: Sequence[str] = NAMES
) -> SignalValues:
    return probe(loaded, ids, [signal_kinds.get(name)() for name in names], chunk_size=chunk)


@torch.no_grad()
def dense_hidden(loaded: LoadedModel, ids: Sequence[int]) -> dict[int, np.ndarray]:
    """Residual stream by layer, -1 the embedding; the last one is caught at the final norm's door."""
    caught: list[Tensor] = []
    handle = loaded.model.model.norm.register_forward_pre_hook(lambda _, given: caught.append(given[0]))
    states = loaded.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    handle.remove()
    streams = [*states[:-1], caught[0]]
    return {layer - 1: stream[0].double().numpy() for layer, stream in enumerate(streams)}


@torch.no_grad()
def dense_cache(loaded: LoadedModel, ids: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of a full cache after one forward over everything, [heads, tokens, head_dim]."""
    name = "cache" if "cache" in inspect.signature(loaded.model.forward).parameters else "past_key_values"
    cache = DynamicCache()
    loaded.model(torch.tensor([list(ids)]), **{name: cache})
    return [(layer.keys[0].double().numpy(), layer.values[0].double().numpy()) for layer in cache.layers]


def norm(rows: np.ndarray) -> np.ndarray:
    return np.sqrt((rows**2).sum(axis=-1))


def hidden_diff(rows: np.ndarray) -> np.ndarray:
    return np.array([[np.nan, *(norm(rows[t] - rows[t - 1]) for t in range(1, len(rows)))]])


def hidden_cosine_diff(rows: np.ndarray) -> np.ndarray:
    cosine = [rows[t] @ rows[t - 1] / norm(rows[t]) / norm(rows[t - 1]) for t in range(1, len(rows))]
    return np.array([[np.nan, *(1 - value for value in cosine)]])


def variance(rows: np.ndarray) -> np.ndarray:
    centred = rows - rows.mean(axis=-1, keepdims=True)
    return (centred**2).sum(axis=-1) / (rows.shape[-1] - 1)


HIDDEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "hidden_diff": hidden_diff,
    "hidden_norm": lambda rows: norm(rows)[None],
    "hidden_cosine_diff": hidden_cosine_diff,
}
CACHED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "key_norm": lambda keys, values: norm(keys),
    "key_variance": lambda keys, values: variance(keys),
    "value_norm": lambda keys, values: norm(values),
    "value_variance": lambda keys, values: variance(values),
}


def reference(loaded: LoadedModel, ids: Sequence[int]) -> dict[tuple[str, int], np.ndarray]:
    found = {}
    for layer, rows in dense_hidden(loaded, ids).items():
        found |= {(name, layer): formula(rows) for name, formula in HIDDEN.items()}
    for layer, pair in enumerate(dense_cache(loaded, ids)):
        found |= {(name, layer): formula(*pair) for name, formula in CACHED.items()}
    return found


def gap(first: np.ndarray, second: np.ndarray) -> float:
    """Largest difference relative to the second's scale; NaN must stand at the same places."""
    assert first.shape == second.shape
    assert (np.isnan(first) == np.isnan(second)).all()
    scale = max(1.0, float(np.nanmax(np.abs(second))))
    return float(np.nanmax(np.abs(first - second))) / scale


def test_every_signal_has_a_reference() -> None:
    assert set(NAMES) == {*HIDDEN, *CACHED}, "a new signal needs a textbook formula here"


@pytest.mark.parametrize("name", NAMES)
def test_declarations(name: str) -> None:
    signal = signal_kinds.get(name)
    assert signal.name == name
    assert re.fullmatch(r"[a-z]\w*", signal.group)
    assert signal.observes in ("hidden", "kv")
    assert all(len(text.strip()) > 3 for text in (signal.unit, signal.source, signal.__doc__ or ""))
    assert signal.horizon >= 0
    assert signal.version >= 1
    if signal.observes == "kv":
        assert not signal.embedding


def test_all_layers_are_there(tiny: LoadedModel) -> None:
    values = run(tiny, draw(tiny))
    for name in NAMES:
        signal = signal_kinds.get(name)
        first = -1 if signal.embedding else 0
        assert {layer for own, layer in values if own == name} == set(range(first, tiny.shape.num_layers))
        heads = tiny.shape.num_kv_heads if signal.observes == "kv" else 1
        for layer in range(first, tiny.shape.num_layers):
            assert values[name, layer].shape == (heads, LENGTH)
            assert values[name, layer].dtype == np.float32


def test_signals_equal_the_dense_reference(tiny: LoadedModel) -> None:
    ids = draw(tiny)
    values, expected = run(tiny, ids, chunk=64), reference(tiny, ids)
    assert set(values) == set(expected)
    gaps = {key: gap(values[key], expected[key]) for key in expected}
    worst = max(gaps, key=lambda key: gaps[key])
    print(f"{tiny.name}: largest relative difference {gaps[worst]:.2e} at {worst}")
    assert gaps[worst] < 1e-5


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
    assert gap(values["key_variance", 0], variance(keys).T) > 1e-3


def test_chunk_size_changes_nothing(tiny: LoadedModel) -> None:
    ids = draw(tiny)
    whole = run(tiny, ids)
    for chunk in (1, 7, 64):
        values = run(tiny, ids, chunk)
        largest = max(gap(values[key], whole[key]) for key in whole)
        print(f"{tiny.name} chunks of {chunk}: {largest:.2e}")
        assert largest < 1e-5


@pytest.mark.parametrize("place", [1, 30, LENGTH - 1])
def test_later_tokens_change_nothing_before(tiny: LoadedModel, place: int) -> None:
    ids = draw(tiny)
    other = [*ids[:place], *(9 + (token - 9 + 1) % 91 for token in ids[place:])]
    causal = [name for name in NAMES if signal_kinds.get(name).horizon == 0]
    before, after = run(tiny, ids, 16, causal), run(tiny, other, 16, causal)
    largest = 0.0
    for key, values in before.items():
        change = np.abs(np.nan_to_num(values) - np.nan_to_num(after[key]))
        largest = max(largest, float(change[:, :place].max()))
        if place > 1 or key[0] not in DIFFS:
            assert change[:, place:].max() > 1e-4, key
    print(f"{tiny.name} from {place}: {largest:.2e}")
    assert largest < 1e-6


def test_missing_is_only_the_first_difference(tiny: LoadedModel) -> None:
    for chunk in (1, 7, 512):
        for (name, _), values in run(tiny, draw(tiny), chunk).items():
            missing = np.isnan(values)
            assert missing[:, 0].all() if name in DIFFS else not missing[:, 0].any()
            assert not missing[:, 1:].any()


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


@pytest.mark.parametrize("name", NAMES)
def test_state_keeps_numbers_and_not_vectors(name: str) -> None:
    """Also through storage: a view of one row keeps the whole chunk alive."""
    signal: Signal = signal_kinds.get(name)()
    heads, chunk, wide = 3, 50, 40
    state, seen = signal.init(), 0
    for seed in range(4):
        torch.manual_seed(seed)
        vectors = torch.randn(heads, chunk, wide)
        hidden = torch.randn(chunk, wide)
        state = signal.update(state, Observation(hidden_CE=hidden, keys_GCD=vectors, values_GCD=vectors + 1))
        seen += chunk
        held = tensors(state)
        assert held
        for tensor in held:
            assert not (tensor.ndim >= 2 and tensor.shape[-1] == wide and tensor.shape[-2] > 1)
        storage = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        rows = heads if signal.observes == "kv" else 1
        assert sum(storage.values()) <= 4 * (rows * seen + wide)
    assert signal.read(state).shape == ((heads if signal.observes == "kv" else 1), seen)


def test_wrong_observation_is_the_engines_mistake() -> None:
    for name in NAMES:
        signal = signal_kinds.get(name)()
        with pytest.raises(RuntimeError, match="the observation has no"):
            signal.update(signal.init(), Observation())
