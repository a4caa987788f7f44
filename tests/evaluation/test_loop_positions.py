"""Rotary positions: absolute, slot and compact, against a transformers cache that is rebuilt by hand at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from budgeted import SLOTS, TOTAL, draw, keep_sets, read, small, task
from torch import Tensor
from transformers import DynamicCache

from cfkv.errors import CfkvError
from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Positions
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import Policy, View, parameters
from cfkv.policies._budget import Budget

START, BASE = 70, 10000.0
# Physical policies of the three mask scopes, per step and every 16.
NAMES = [
    "streaming_llm",
    "epikv",
    "raas_epikv",
    "tova",
    "longflow",
    "h2o",
    "knorm",
    "keydiff",
    "r_kv",
    "snapkv_decode",
]
KeepSets = dict[int, dict[tuple[int, int], Sequence[int]]]


def rotated(raw: Tensor, places: Tensor) -> Tensor:
    """Llama's rotary embedding, from its paper: [..., n, D] by the angles of places [..., n]."""
    half = raw.shape[-1] // 2
    angles = places[..., None] * BASE ** (-torch.arange(half) / half)
    one, two = raw[..., :half], raw[..., half:]
    return torch.cat(
        [one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], dim=-1
    )


@contextmanager
def raw_keys(model: Any, into: list[Tensor]) -> Any:
    """What the key projections put out, [G, tokens, D] of each layer."""
    heads = model.config.num_key_value_heads

    def hook(module: Any, arguments: Any, output: Tensor) -> None:
        into.append(output[0].unflatten(-1, (heads, -1)).transpose(0, 1))

    handles = [block.self_attn.k_proj.register_forward_hook(hook) for block in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def by_hand(model: Any, ids: Sequence[int], kept: KeepSets, positions: Positions) -> Tensor:
    """Logits after each token from START on, from a cache that is made anew for each of them.

    kept : after how many tokens which positions are left, for each (layer, KV head).
    """
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    own: list[Tensor] = []
    whole = DynamicCache()
    with raw_keys(model, own):
        compat.forward(model, torch.tensor([list(ids[:START])]), whole)
    raw = [layer.clone() for layer in own]
    values = [whole.layers[layer].values[0] for layer in range(layers)]
    rotary = torch.arange(START)  # as each token was rotated at its birth
    left = {(layer, head): [*range(START)] for layer in range(layers) for head in range(heads)}
    left.update(kept.get(START, {}))
    found = []
    for step in range(START, len(ids)):
        cache, held = DynamicCache(), len(left[0, 0])
        for layer in range(layers):
            places = [torch.tensor(left[layer, head]) for head in range(heads)]
            angles = [torch.arange(held) if positions == "compact" else rotary[index] for index in places]
            keys = torch.stack([rotated(raw[layer][g, places[g]], angles[g]) for g in range(heads)])
            picked = torch.stack([values[layer][g, places[g]] for g in range(heads)])
            cache.update(keys[None], picked[None], layer)
        now = step if positions == "absolute" else held
        own.clear()
        with raw_keys(model, own):
            logits = compat.forward(
                model, torch.tensor([[ids[step]]]), cache, positions=torch.tensor([[now]])
            )
        found.append(logits[0, -1])
        rotary = torch.cat([rotary, torch.tensor([now])])
        for layer in range(layers):
            raw[layer] = torch.cat([raw[layer], own[layer]], dim=1)
            values[layer] = torch.cat([values[layer], cache.layers[layer].values[0, :, -1:]], dim=1)
        left = {place: [*before, step] for place, before in left.items()}
        left.update(kept.get(step + 1, {}))
    return torch.stack(found)


def run(loaded: LoadedModel, name: str, ids: Sequence[int], positions: Positions) -> tuple[Tensor, KeepSets]:
    """The loop's logits, and its keep sets for each layer and KV head."""
    reading = read(loaded, [small(name)], ids, START)
    steps: list[Tensor] = []
    (outcome,) = decode(
        [task(reading, 0, ids, Budget(slots=SLOTS), positions=positions, record=True)],
        1,
        watch=lambda index, step, logits: steps.append(logits.clone()),
    )
    assert outcome.status == "ok", outcome.reason
    kept: KeepSets = {}
    for layer, head, step, places in keep_sets(outcome):
        for l in range(loaded.shape.num_layers) if layer < 0 else (layer,):  # noqa: E741
            for g in range(loaded.shape.num_kv_heads) if head < 0 else (head,):
                kept.setdefault(step, {})[l, g] = places
    return torch.stack(steps), kept


@pytest.mark.parametrize("positions", ["absolute", "slot", "compact"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_a_cache_rebuilt_by_hand(
    name: str, positions: Positions, llama: LoadedModel
) -> None:
    """The kept entries in order of time, their keys rotated by the book."""
    ids = draw(llama, TOTAL)
    found, kept = run(llama, name, ids, positions)
    gap = float((found - by_hand(llama.model, ids, kept, positions)).abs().max())
    print(f"{name}, {positions}: largest difference {gap:.1e}")
    assert gap < 1e-4


def streaming(length: int) -> KeepSets:
    """Four sinks and the newest, written out."""
    every = [(layer, head) for layer in range(3) for head in range(2)]
    steps = range(START, length + 1)
    return {step: dict.fromkeys(every, (0, 1, 2, 3, *range(step - SLOTS + 4, step))) for step in steps}


@pytest.mark.parametrize(
    ("name", "positions"),
    [("streaming_llm_rerotated", "absolute"), ("streaming_llm", "compact"), ("streaming_llm", "slot")],
)
def test_streaming_from_scratch(name: str, positions: Positions, llama: LoadedModel) -> None:
    """Without the loop's keep sets; streaming_llm_rerotated is compact, whatever it is told."""
    ids = draw(llama, TOTAL)
    found, kept = run(llama, name, ids, positions)
    assert kept == streaming(TOTAL)
    mode: Positions = "slot" if positions == "slot" else "compact"
    assert float((found - by_hand(llama.model, ids, streaming(TOTAL), mode)).abs().max()) < 1e-4


def test_the_positions_differ(llama: LoadedModel) -> None:
    """None of the three is another by accident."""
    ids = draw(llama, TOTAL)
    found = [run(llama, "streaming_llm", ids, mode)[0] for mode in ("absolute", "slot", "compact")]  # type: ignore[arg-type]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert float((found[one] - found[two]).abs().max()) > 1e-2


@parameters
class Newest(Policy):
    """A window and no sinks."""

    name: ClassVar[str] = "newest"

    def score(self, view: View) -> Tensor:
        return view.positions.float()


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3", "mistral"])
def test_compact_is_absolute_where_nothing_was_evicted_in_between(
    family: str, make_tiny: Callable[[str, str], LoadedModel]
) -> None:
    """Evicting only the oldest shifts all kept positions alike: on full layers nothing changes but rounding.

    A sliding window counts absolute distances in both.
    """
    loaded = make_tiny(family, "sdpa")
    ids = draw(loaded, TOTAL)
    logits: dict[str, Tensor] = {}
    for mode in ("absolute", "compact"):
        reading = read(loaded, [Newest()], ids, START)
        steps: list[Tensor] = []
        decode(
            [task(reading, 0, ids, Budget(slots=SLOTS), positions=mode)],
            1,
            watch=lambda index, step, logits, steps=steps: steps.append(logits.clone()),
        )
        logits[mode] = torch.stack(steps)
    assert float((logits["absolute"] - logits["compact"]).abs().max()) < 1e-4


@pytest.mark.parametrize("positions", ["slot", "compact"])
@pytest.mark.parametrize(("name", "options"), [("h2o", {"simulate": True}), ("ada_kv", {})])
def test_masks_have_no_other_positions(
    name: str, options: dict[str, bool], positions: Positions, llama: LoadedModel
) -> None:
    """Simulated eviction leaves holes: refused with what to set instead."""
    ids = draw(llama, 75)
    reading = read(llama, [small(name)], ids, START)
    wanted = task(reading, 0, ids, Budget(slots=SLOTS), positions=positions, **options)
    with pytest.raises(CfkvError, match=f"policy {name} is simulated .*--positions absolute"):
        decode([wanted], 1)


@pytest.mark.parametrize("positions", ["slot", "compact"])
@pytest.mark.parametrize("name", ["chunkkv", "pyramidkv"])
def test_layers_of_different_length_have_no_other_positions(
    name: str, positions: Positions, llama: LoadedModel
) -> None:
    """A token has one rotary position, but another place in the cache of each layer."""
    ids = draw(llama, 75)
    reading = read(llama, [small(name)], ids, START)
    with pytest.raises(CfkvError, match=f"policy {name} keeps .* on different layers.*--positions absolute"):
        decode([task(reading, 0, ids, Budget(slots=SLOTS), positions=positions)], 1)
