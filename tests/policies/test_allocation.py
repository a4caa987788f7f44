"""How many tokens layers, heads and chunks keep: the keep sets of policies that share a budget out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from dense_cache import Dense
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_formulas import chunk_means, lagkv, manifoldkv, snapkv
from torch import Tensor
from world import KV_HEADS, LAYERS, Table, World

from cfkv.errors import CfkvError
from cfkv.policies._adaptive import rounded
from cfkv.policies._base import Policy, View, make_policy
from cfkv.policies._budget import Budget, keep_mask
from cfkv.policies.pyramidkv import pyramid

LENGTH, PROMPT = 150, 40


@pytest.fixture(scope="module")
def world() -> World:
    return World(LENGTH, PROMPT, seed=4)


def evict(
    world: World, policy: Policy, budget: Budget, **extra: Tensor
) -> tuple[Table, View, list[list[set[int]]]]:
    """The whole cache, the view of it, and the tokens that each row keeps."""
    table = world.fill(policy, LENGTH)
    view = world.view(policy, table, slots=budget.slots, extra=extra)
    keep = keep_mask(policy, view, budget)
    kept = [
        [set(row[mask].tolist()) for row, mask in zip(*pair, strict=True)]
        for pair in zip(table.tokens, keep, strict=True)
    ]
    return table, view, kept


def counts(kept: list[list[set[int]]]) -> list[list[int]]:
    return [[len(row) for row in layer] for layer in kept]


# PyramidKV


def test_the_published_pyramid() -> None:
    """C = 2048, w = 32, 32 layers: c = 2016, min = 100, max = 3932, step = 3832 // 31 = 123, 3932 - 31 * 123 = 119."""
    kept = pyramid(room=2016, free=10000, window=32, layers=32, beta=20)
    assert kept == [3932 - 123 * layer for layer in range(32)]
    assert (kept[0], kept[-1], sum(kept) / 32) == (3932, 119, 2025.5)


def test_a_pyramid_is_no_higher_than_the_cache() -> None:
    """max = 250 of 224 candidates: 224, then min = 256 - 224 = 32 and step = 192 // 3 = 64."""
    assert pyramid(room=128, free=224, window=32, layers=4, beta=20) == [224, 160, 96, 32]


def test_a_short_prompt_is_flat() -> None:
    """Below 2 c tokens, the window included, every layer keeps c."""
    assert pyramid(room=128, free=223, window=32, layers=4, beta=20) == [128] * 4
    assert pyramid(room=128, free=10000, window=32, layers=1, beta=20) == [128]


def test_pyramidkv_keeps_what_snapkv_ranks_first(world: World) -> None:
    """118 candidates and c = 50: min = 2, max = 98, step 48: 98, 50 and 2, and the window of 32."""
    policy = make_policy("pyramidkv")
    table, _, kept = evict(world, policy, Budget(slots=82))
    assert counts(kept) == [[130, 130], [82, 82], [34, 34]]
    scores = snapkv(32, 5, "average")(Dense(world, table))
    for layer, count in enumerate((98, 50, 2)):
        for head in range(KV_HEADS):
            best = sorted(range(118), key=lambda t: -scores[layer, head, t])[:count]  # noqa: B023
            assert kept[layer][head] == {*best, *range(118, LENGTH)}


# Ada-KV


def contest(scores: dict[tuple[int, int], float], room: int) -> Counter[int]:
    """Who of the heads has the best `room` of {(head, token): score}."""
    return Counter(head for head, _ in sorted(scores, key=lambda key: -scores[key])[:room])


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("slots", [42, 62, 100])
def test_ada_kv_fill(alpha: float, slots: int, world: World) -> None:
    """Each head its own best floor, then the layer's best of the rest."""
    policy = make_policy("ada_kv_fill", {"alpha": alpha})
    table, _, kept = evict(world, policy, Budget(slots=slots))
    scores = snapkv(32, 7, "max")(Dense(world, table))
    room, window = slots - 32, set(range(118, LENGTH))
    floor = int(alpha * room + 1e-9)
    for layer in range(LAYERS):
        chosen: set[tuple[int, int]] = set()
        free = {(head, t): float(scores[layer, head, t]) for head in range(KV_HEADS) for t in range(118)}
        # Pooling by a maximum makes equal scores: the later token is first.
        order = sorted(free, key=lambda key: (-free[key], -key[1]))
        for head in range(KV_HEADS):
            chosen |= set([key for key in order if key[0] == head][:floor])
        chosen |= set([key for key in order if key not in chosen][: KV_HEADS * room - len(chosen)])
        found = {(head, t) for head in range(KV_HEADS) for t in kept[layer][head] - window}
        values = [sorted(free[key] for key in keys) for keys in (found, chosen)]
        assert values[0] == pytest.approx(values[1])
        assert sum(counts(kept)[layer]) == KV_HEADS * slots
        assert min(counts(kept)[layer]) >= 32 + floor


@pytest.mark.parametrize("slots", [35, 70, 120])
def test_ada_kv_blends(slots: int, world: World) -> None:
    """B_h within one of .8 c_h + floor(.2 B), adding up to G * B."""
    options = {"base": "manifoldkv", "alpha": 0.2}
    table, _, kept = evict(world, make_policy("ada_kv", options), Budget(slots=slots))
    scores = manifoldkv()(Dense(world, table))
    for layer in range(LAYERS):
        free = {(head, t): float(scores[layer, head, t]) for head in range(KV_HEADS) for t in range(LENGTH)}
        won = contest(free, KV_HEADS * slots)
        found = counts(kept)[layer]
        assert sum(found) == KV_HEADS * slots
        for head in range(KV_HEADS):
            wanted = 0.8 * won[head] + int(0.2 * slots)
            assert abs(found[head] - wanted) <= 1
            best = sorted(range(LENGTH), key=lambda t: -scores[layer, head, t])[: found[head]]  # noqa: B023
            assert kept[layer][head] == set(best)


def test_rounding_by_hand() -> None:
    """.8 * 6 + 0 = 4.8 and .8 * 2 = 1.6 are to add up to 8: 4 and 1, then one for the larger rest, the other, the
    larger again. With room for 5 in the first head, the second takes what is left."""
    wanted = torch.tensor([[4.8, 1.6], [4.8, 1.6]])
    assert rounded(wanted, torch.tensor([[20, 20], [5, 20]]), 8).tolist() == [[6, 2], [5, 3]]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), total=st.integers(0, 40))
def test_rounded_adds_up(data: st.DataObject, total: int) -> None:
    limits = torch.tensor([data.draw(st.lists(st.integers(0, 12), min_size=3, max_size=3))])
    parts = data.draw(st.lists(st.floats(0, 1), min_size=3, max_size=3))
    wanted = torch.tensor([parts], dtype=torch.float64) * total / max(sum(parts), 1)
    found = rounded(wanted, limits, total)
    assert int(found.sum()) == min(total, int(limits.sum()))
    assert (found <= limits).all()
    assert (found >= torch.minimum(wanted.floor().long(), limits)).all()


@pytest.mark.parametrize("name", ["ada_kv", "ada_kv_fill"])
def test_the_floor_holds(name: str) -> None:
    """alpha .29 of 100: 29 for a head that wins nothing. .29 * 100 is 28.999999999999996 in floats."""
    world = World(210, 10)
    world.keys[:, 1] *= 1e-3
    policy = make_policy(name, {"base": "manifoldkv", "alpha": 0.29})
    found = keep_mask(policy, world.view(policy, world.fill(policy, 210)), Budget(slots=100)).sum(dim=-1)
    assert found.tolist() == [[171, 29]] * LAYERS


def test_normalised_by_the_mean_a_larger_head_takes_no_more(world: World) -> None:
    options = {"base": "manifoldkv", "alpha": 0.0}
    even = make_policy("ada_kv_fill", {**options, "normalise": "mean"})
    before = counts(evict(world, even, Budget(slots=50))[2])
    larger = World(LENGTH, PROMPT, seed=4)
    larger.keys[:, 0] *= 100
    assert counts(evict(larger, even, Budget(slots=50))[2]) == before
    assert (
        counts(evict(larger, make_policy("ada_kv_fill", options), Budget(slots=50))[2]) == [[100, 0]] * LAYERS
    )


def test_normalised_by_mass(world: World) -> None:
    """Scores times the share of the head's sum that its best B hold."""
    policy = make_policy("ada_kv_fill", {"base": "manifoldkv", "alpha": 0.0, "normalise": "mass"})
    table, _, kept = evict(world, policy, Budget(slots=50))
    scores = manifoldkv()(Dense(world, table))
    for layer in range(LAYERS):
        free = {}
        for head in range(KV_HEADS):
            row = scores[layer, head]
            share = sorted(row)[-50:]
            free.update({(head, t): float(row[t] * sum(share) / row.sum()) for t in range(LENGTH)})
        won = contest(free, 100)
        assert counts(kept)[layer] == [won[0], won[1]]


def test_a_base_without_a_score_per_head() -> None:
    with pytest.raises(CfkvError, match="base 'tova' has no score per KV head"):
        make_policy("ada_kv", {"base": "tova"})


def test_the_faithful_manifoldkv_of_page_can_be_named() -> None:
    """Masks per KV head with Ada-KV's floor of a half."""
    policy = make_policy("ada_kv_fill", {"base": "manifoldkv", "alpha": 0.5})
    assert (policy.needs, policy.mask_scope, policy.ragged) == (("keys",), "kv_head", True)


# ChunkKV


@pytest.mark.parametrize("slots", [42, 45, 52, 60, 62, 99, 149])
def test_whole_chunks(slots: int, world: World) -> None:
    """118 tokens before the window: 11 chunks of 10 and one of 8. The best that fit, in order of their score."""
    policy = make_policy("chunkkv")
    table, _, kept = evict(world, policy, Budget(slots=slots))
    expected = set(range(118, LENGTH))
    for _, tokens in sorted(chunk_means(Dense(world, table), 10, 32), reverse=True):
        if len(expected) + len(tokens) > slots:
            break
        expected |= set(tokens)
    assert kept[0] == [expected]


def test_equal_chunks_are_apart(world: World) -> None:
    """Uniform attention: 25 tokens hold the two latest chunks, of 8 and of 10."""
    uniform = torch.full((LAYERS, 4, 32, LENGTH + 5), 0.01)
    kept = evict(world, make_policy("chunkkv"), Budget(slots=57), attention=uniform)[2]
    assert kept == [[set(range(100, LENGTH))]] * LAYERS


def test_a_budget_below_one_chunk(world: World) -> None:
    """The newest tokens of the best chunk."""
    policy = make_policy("chunkkv")
    table, _, kept = evict(world, policy, Budget(slots=36))
    best = max(chunk_means(Dense(world, table), 10, 32))[1]
    assert kept[0] == [{*best[-4:], *range(118, LENGTH)}]


# Others


def test_scissorhands_drops_half_of_its_budget(world: World) -> None:
    """At 101 of 100 tokens and at 150: 50 stay, the last 10 among them; at 100 all."""
    policy = make_policy("scissorhands")
    for slots, left in ((100, 50), (149, 75), (LENGTH, LENGTH)):
        kept = evict(world, policy, Budget(slots=slots))[2]
        assert counts(kept) == [[left, left]] * LAYERS
        assert all(set(range(140, LENGTH)) <= row for layer in kept for row in layer)
    gentle = make_policy("scissorhands", {"drop": 0.1})
    assert counts(evict(world, gentle, Budget(slots=100))[2]) == [[90, 90]] * LAYERS


def test_knorm_may_skip_layers(world: World) -> None:
    policy = make_policy("knorm", {"skip_layers": (0, 1)})
    assert policy.ragged
    assert counts(evict(world, policy, Budget(slots=30))[2]) == [[LENGTH] * 2, [LENGTH] * 2, [30] * 2]


def test_lagkv_keeps_the_last_full_partition_and_the_rest(world: World) -> None:
    """4 sinks, partitions of 20: 7 full ones and 6 tokens; from 124 on all stays, of the others the best 40."""
    policy = make_policy("lagkv", {"sinks": 4, "lag": 20})
    table, _, kept = evict(world, policy, Budget(slots=70))
    scores = lagkv(4, 20, ranks=False)(Dense(world, table))
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            best = sorted(range(4, 124), key=lambda t: -scores[layer, head, t])[:40]  # noqa: B023
            assert kept[layer][head] == {*range(4), *best, *range(124, LENGTH)}
