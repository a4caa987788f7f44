"""The cache, positions and masks behind every replay, held against the model's own plain forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from cfkv.errors import CfkvError
from cfkv.models import compat
from cfkv.models.loading import LoadedModel

LENGTH, WINDOW = 29, 8
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")


def draw(loaded: LoadedModel, length: int, seed: int = 0, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, loaded.shape.vocabulary, (rows, length), generator=generator)


def largest(first: Tensor, second: Tensor) -> float:
    assert first.shape == second.shape
    return float((first - second).abs().max())


def forward_by_chunks(loaded: LoadedModel, ids: Tensor, size: int) -> Tensor:
    cache = compat.new_cache()
    pieces = [
        compat.forward(loaded.model, ids[:, start : start + size], cache)
        for start in range(0, ids.shape[1], size)
    ]
    assert compat.cache_length(cache) == ids.shape[1]
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("size", [1, 7, LENGTH])
def test_chunked_forward_is_plain_forward(
    make_tiny: Callable[..., LoadedModel], tiny: LoadedModel, size: int, attention: str
) -> None:
    loaded = make_tiny(tiny.name.removeprefix("tiny-"), attention)
    ids = draw(loaded, LENGTH, rows=2)
    difference = largest(forward_by_chunks(loaded, ids, size), loaded.model(ids).logits)
    print(f"{tiny.name} {attention} chunks of {size}: {difference:.2e}")
    assert difference < 1e-5


def test_every_layer_of_the_cache_holds_every_token(tiny: LoadedModel) -> None:
    cache = compat.new_cache()
    compat.forward(tiny.model, draw(tiny, LENGTH), cache)
    for layer in range(tiny.shape.num_layers):
        keys, values = compat.cache_keys_values(cache, layer)
        assert keys.shape == values.shape == (1, tiny.shape.num_kv_heads, LENGTH, tiny.shape.head_dim)


def test_logits_to_keep(llama: LoadedModel) -> None:
    ids = draw(llama, 9)
    whole = llama.model(ids).logits
    for keep in (1, 4):
        kept = compat.forward(llama.model, ids, compat.new_cache(), logits_to_keep=keep)
        assert largest(kept, whole[:, -keep:]) < 1e-5


def own_mask(loaded: LoadedModel, kind: str, length: int) -> Tensor:
    """Who sees whom, entry by entry: causal, and nearer than the window on sliding layers."""
    window = WINDOW if kind == "sliding_attention" else length
    rows = [[0 <= query - key < window for key in range(length)] for query in range(length)]
    return torch.tensor(rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_from_positions_are_the_models_own(
    make_tiny: Callable[..., LoadedModel], tiny: LoadedModel, attention: str
) -> None:
    loaded = make_tiny(tiny.name.removeprefix("tiny-"), attention)
    ids, positions = draw(loaded, LENGTH), torch.arange(LENGTH)
    masks = compat.masks_from_positions(loaded.model, positions, positions)
    by_kind = masks if isinstance(masks, dict) else {loaded.shape.layer_types[0]: masks}
    assert set(loaded.shape.layer_types) <= set(by_kind)
    for kind, mask in by_kind.items():
        assert mask.shape == (1, 1, LENGTH, LENGTH)
        seen = mask[0, 0] == 0 if attention == "eager" else mask[0, 0]
        assert torch.equal(seen, own_mask(loaded, kind, LENGTH))
    masked = compat.forward(loaded.model, ids, compat.new_cache(), attention_mask=masks)
    difference = largest(masked, loaded.model(ids).logits)
    print(f"{tiny.name} {attention} own mask: {difference:.2e}")
    assert difference < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("gone", [slice(0, 3), slice(6, 14), slice(17, 22)])
def test_evicted_cache_is_masked_full_forward(
    make_tiny: Callable[..., LoadedModel], tiny: LoadedModel, gone: slice, attention: str
) -> None:
    """Reference: one forward over all tokens in which the queries after the eviction do not see those slots."""
    loaded = make_tiny(tiny.name.removeprefix("tiny-"), attention)
    prefix = 24
    ids, positions = draw(loaded, LENGTH), torch.arange(LENGTH)
    full = compat.masks_from_positions(loaded.model, positions, positions)
    blind = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    blind[prefix:, gone] = True

    def hide(mask: Tensor) -> Tensor:
        return mask.masked_fill(blind, torch.finfo(mask.dtype).min if mask.is_floating_point() else False)

    masks = {kind: hide(mask) for kind, mask in full.items()} if isinstance(full, dict) else hide(full)
    expected = compat.forward(loaded.model, ids, compat.new_cache(), attention_mask=masks)[:, prefix:]

    cache = compat.new_cache()
    compat.forward(loaded.model, ids[:, :prefix], cache)
    kept = torch.tensor([i for i in range(prefix) if i not in range(prefix)[gone]])
    keys = torch.cat([kept, positions[prefix:]])
    mask = compat.masks_from_positions(loaded.model, positions[prefix:], keys)
    evicted = compat.forward(
        loaded.model,
        ids[:, prefix:],
        compat.map_cache(cache, slots=kept),
        positions=positions[None, prefix:],
        attention_mask=mask,
    )
    difference = largest(evicted, expected)
    print(f"{tiny.name} {attention} without {gone}: {difference:.2e}")
    assert difference < 1e-4

    hidden = torch.zeros(LENGTH, dtype=torch.bool)
    hidden[gone] = True
    mask = compat.masks_from_positions(loaded.model, positions[prefix:], positions, hidden)
    masked = compat.forward(
        loaded.model, ids[:, prefix:], cache, positions=positions[None, prefix:], attention_mask=mask
    )
    assert largest(masked, expected) < 1e-4
    if gone.start > prefix - WINDOW or "full_attention" in loaded.shape.layer_types:
        assert largest(loaded.model(ids).logits[:, prefix:], expected) > 1e-2  # the eviction matters


def test_hidden_token_still_sees_itself(llama: LoadedModel) -> None:
    positions = torch.arange(4)
    hidden = torch.tensor([False, True, False, True])
    mask = compat.masks_from_positions(llama.model, positions, positions, hidden)
    assert isinstance(mask, Tensor)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_map_cache_takes_rows_and_slots_and_leaves_the_original(tiny: LoadedModel) -> None:
    cache = compat.new_cache()
    compat.forward(tiny.model, draw(tiny, 10, rows=3), cache)
    before = [compat.cache_keys_values(cache, layer) for layer in range(tiny.shape.num_layers)]
    rows, slots = torch.tensor([2, 0]), torch.tensor([1, 4, 9])
    taken = compat.map_cache(cache, rows=rows, slots=slots)
    assert compat.cache_length(taken) == 3
    cut = compat.map_cache(cache, slots=slice(0, 6))
    for layer, pair in enumerate(before):
        for own, mine, short in zip(
            pair,
            compat.cache_keys_values(taken, layer),
            compat.cache_keys_values(cut, layer),
            strict=True,
        ):
            for new_row, row in enumerate([2, 0]):
                for new_slot, slot in enumerate([1, 4, 9]):
                    assert torch.equal(mine[new_row, :, new_slot], own[row, :, slot])
            assert torch.equal(short, own[:, :, :6])
    compat.forward(tiny.model, draw(tiny, 2, rows=3), cut)
    assert (compat.cache_length(cut), compat.cache_length(cache)) == (8, 10)
    for layer, pair in enumerate(before):
        assert all(map(torch.equal, pair, compat.cache_keys_values(cache, layer)))


def test_layer_types() -> None:
    assert compat.layer_types(LlamaConfig(num_hidden_layers=2)) == ["full_attention"] * 2
    sliding = MistralConfig(num_hidden_layers=2, sliding_window=4)
    assert compat.layer_types(sliding) == ["sliding_attention"] * 2
    assert (
        compat.layer_types(MistralConfig(num_hidden_layers=2, sliding_window=None)) == ["full_attention"] * 2
    )
    mixed = Qwen2Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    assert compat.layer_types(mixed) == ["full_attention", "full_attention", "sliding_attention"]
    off = Qwen2Config(num_hidden_layers=2, use_sliding_window=False, sliding_window=4)
    assert compat.layer_types(off) == ["full_attention"] * 2


def test_decoder_layers(tiny: LoadedModel) -> None:
    layers = list(compat.decoder_layers(tiny.model))
    assert layers == list(tiny.model.model.layers)
    headless = torch.nn.Module()
    headless.model = torch.nn.Linear(2, 2)
    with pytest.raises(CfkvError, match="no list of decoder layers"):
        compat.decoder_layers(headless)
