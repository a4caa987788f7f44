"""Blocks with budgets of 64, 32 and 8 tokens: the keep sets of ThinKV-EpiKV and of the hybrids, by plain code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_cache import Array, Dense, array
from policy_formulas import rolling_z
from world import HEADS, LAYERS, World, thinned

from cfkv.policies._base import make_policy
from cfkv.policies._budget import Budget, keep_mask
from cfkv.policies._segments import Segments

LENGTH, PROMPT, BLOCK = 700, 40, 128


@pytest.fixture(scope="module")
def world() -> World:
    return World(LENGTH, PROMPT, seed=2)


def entropies(cache: Dense, blocks: list[Array], layers: range) -> list[float]:
    """Of the last query's attention within each block, mean over heads and layers; `blocks`: places in the cache."""
    found = []
    for places in blocks:
        values = []
        for layer in layers:
            for h in range(HEADS):
                share = cache.row(layer, h, cache.step - 1)[places]
                share = share / share.sum()
                values.append(-(share * np.log(share)).sum())
        found.append(float(np.mean(values)))
    return found


def filled(
    held: Array, blocks: list[Array], types: list[float], worth: Array, protected: set[int], slots: int
) -> set[int]:
    """Lowest third of `types`: 64 tokens, middle: 32, highest: 8; the oldest block first until `slots` are full."""
    by_type = sorted(range(len(blocks)), key=lambda index: types[index])
    rung = {index: (64, 32, 8)[3 * place // len(blocks)] for place, index in enumerate(by_type)}
    kept = set(protected)
    for index, places in enumerate(blocks):
        free = [int(place) for place in places if int(held[place]) not in protected]
        best = sorted(free, key=lambda place: (-worth[place], -held[place]))[: rung[index]]
        kept |= {int(held[place]) for place in best[: max(slots - len(kept), 0)]}
    return kept


def expected(name: str, cache: Dense, slots: int, last_layers: int) -> set[int]:
    held = cache.kept[0][0]
    blocks = [np.arange(start, min(start + BLOCK, len(held))) for start in range(0, len(held), BLOCK)]
    window = min(128, slots // 4)
    protected = {int(t) for t in held if t >= cache.step - window}
    if name == "thinkv_epikv":
        worth = np.mean([cache.row(LAYERS - 1, h, cache.step - 1) for h in range(HEADS)], axis=0)
    else:
        protected |= {int(t) for t in held if t < PROMPT}
        z_10, z_21 = (rolling_z(cache.hidden_diff[layer, PROMPT:]) for layer in (1, 2))  # of 3 layers
        worth = np.concatenate([np.zeros(PROMPT), z_10 - z_21])[held]
    if name == "segment_hybrid_keys":
        spread = cache.all_keys.var(axis=-1, ddof=1).mean(axis=(0, 1))[held]
        types = [-float(spread[places].mean()) for places in blocks]  # the highest third reasons
    else:
        types = entropies(cache, blocks, range(LAYERS - last_layers, LAYERS))
    return filled(held, blocks, types, worth, protected, slots)


@pytest.mark.parametrize("slots", [120, 200, 300, 360])
@pytest.mark.parametrize("name", ["thinkv_epikv", "segment_hybrid", "segment_hybrid_keys"])
@pytest.mark.parametrize("keep", [LENGTH, 450])
def test_keep_sets(name: str, slots: int, keep: int, world: World) -> None:
    """A whole cache has 6 blocks, 2 of each type: 2 * (64 + 32 + 8) = 208 tokens beside what is protected."""
    policy = make_policy(name, {} if name == "segment_hybrid_keys" else {"last_layers": 2})
    table = world.fill(policy, LENGTH, block=128)
    if keep < LENGTH:
        table = thinned(world, policy, table, keep, slots)
    mask = keep_mask(policy, world.view(policy, table, slots=slots), Budget(slots=slots))
    found = set(table.tokens[mask].tolist())
    assert found == expected(name, Dense(world, table), slots, 2)
    assert len(found) <= slots


def test_the_last_four_layers_are_asked() -> None:
    assert make_policy("thinkv_epikv").last_layers == make_policy("segment_hybrid").last_layers == 4  # type: ignore[attr-defined]


def test_uniform_attention_within_a_block_has_the_largest_entropy(world: World) -> None:
    """Three blocks of 4: one token has all, two share, all share: entropies 0, ln 2, ln 4."""
    policy = make_policy("thinkv_epikv")
    table = world.fill(policy, 12, spare=0)
    row = torch.zeros(1, 1, 12)
    weights = {0: 0.1, 4: 0.2, 6: 0.2, 8: 0.05, 9: 0.05, 10: 0.05, 11: 0.05}
    for token, weight in weights.items():
        row[0, 0, (table.tokens[0, 0] == token).nonzero()[0]] = weight
    found = array(Segments(world.view(policy, table), 4).entropies(row))
    assert np.allclose(found, [0, np.log(2), np.log(4)], atol=1e-6)
