"""Controls and baselines without a score of their own, by hand."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor
from world import World, by_token

from cfkv.policies._base import View, make_policy
from cfkv.policies._budget import Budget, keep_mask
from cfkv.policies._labels import shuffled

LENGTH, PROMPT = 100, 10
NAN = float("nan")


@pytest.fixture(scope="module")
def world() -> World:
    return World(LENGTH, PROMPT)


def kept(world: World, name: str, slots: int, budget: Budget | None = None) -> list[int]:
    policy = make_policy(name)
    table = world.fill(policy, LENGTH)
    keep = keep_mask(policy, world.view(policy, table, slots=slots), budget or Budget(slots=slots))
    return sorted(table.tokens[keep].tolist())


def view(positions: list[int], *, seed: int = 0, **columns: list[float]) -> View:
    """A row of slots with these positions, a prompt of 2 tokens protected."""
    held = torch.tensor(positions)[None, None]
    return View(
        step=max(positions) + 1,
        prompt_len=2,
        positions=held,
        valid=torch.ones_like(held, dtype=torch.bool),
        protected=held < 2,
        columns={name: torch.tensor(values)[None, None] for name, values in columns.items()},
        seed=seed,
    )


def draw(seed: int, position: int) -> float:
    """SplitMix64 with unbounded integers, the upper 24 bits."""
    state = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return ((state ^ (state >> 31)) >> 40) / 2**24


def draws(name: str, seed: int, count: int = 4000) -> Tensor:
    return make_policy(name).score(view(list(range(count)), seed=seed))[0, 0]


@pytest.mark.parametrize("name", ["random", "random_page"])
def test_random_is_a_function_of_seed_and_position(name: str) -> None:
    for seed in (0, 7, 2**40):
        assert draws(name, seed, 50).tolist() == [draw(seed, position) for position in range(50)]
    scattered = make_policy(name).score(view([90, 3, 41], seed=7))[0, 0]
    assert scattered.tolist() == [draw(7, 90), draw(7, 3), draw(7, 41)]


def test_random_is_uniform_and_seeds_are_independent() -> None:
    first, second = draws("random", 1), draws("random", 2)
    assert kstest(first.numpy(), "uniform").pvalue > 0.01
    assert kstest(second.numpy(), "uniform").pvalue > 0.01
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.05


def test_random_keeps_the_prompt_or_the_ends(world: World) -> None:
    assert kept(world, "random", 40)[:PROMPT] == list(range(PROMPT))
    ends = {*range(4), *range(LENGTH - 32, LENGTH)}
    assert ends < set(kept(world, "random_page", 40))


@pytest.mark.parametrize("name", ["streaming_llm", "streaming_llm_rerotated"])
def test_streaming_llm(name: str, world: World) -> None:
    for slots in (5, 20, 99):
        assert kept(world, name, slots) == [*range(4), *range(LENGTH - slots + 4, LENGTH)]


def test_streaming_llm_36_is_the_same_at_every_budget(world: World) -> None:
    for budget in (Budget(slots=37), Budget(slots=90), Budget(slots=10, scope="beyond_protected")):
        assert kept(world, "streaming_llm_36", 37, budget) == [*range(4), *range(LENGTH - 32, LENGTH)]


def test_full_has_no_preference() -> None:
    assert make_policy("full").score(view([4, 0, 9])).tolist() == [[[0, 0, 0]]]


def test_oracle_by_hand() -> None:
    """Labels of positions 2..7; 5 is untested, which counts as 0, and ties go to the later one."""
    label = [NAN, NAN, 0.1, 0.7, 0.0, NAN, 0.7, -0.2]
    shown = view(list(range(8)), label=label)
    for slots, expected in ((3, {0, 1, 6}), (4, {0, 1, 3, 6}), (5, {0, 1, 2, 3, 6}), (6, {0, 1, 2, 3, 5, 6})):
        assert places(keep_mask(make_policy("oracle"), shown, Budget(slots=slots))) == expected
    for slots, expected in ((3, {0, 1, 7}), (4, {0, 1, 5, 7}), (5, {0, 1, 4, 5, 7}), (6, {0, 1, 2, 4, 5, 7})):
        assert places(keep_mask(make_policy("anti_oracle"), shown, Budget(slots=slots))) == expected
    dealt = view(list(range(8)), shuffled_label=label)
    assert places(keep_mask(make_policy("shuffled_oracle"), dealt, Budget(slots=4))) == {0, 1, 3, 6}


def places(keep: Tensor) -> set[int]:
    return set(keep[0, 0].nonzero()[:, 0].tolist())


def test_shuffling_deals_tested_labels_among_tested_tokens(world: World) -> None:
    tested = ~world.label.isnan()
    dealt = [shuffled(world.label, seed) for seed in (1, 2)]
    for labels in dealt:
        assert torch.equal(labels.isnan(), ~tested)
        assert torch.equal(labels[tested].sort().values, world.label[tested].sort().values)
        assert (labels[tested] == world.label[tested]).float().mean() < 0.2
    assert not torch.equal(dealt[0][tested], dealt[1][tested])
    assert torch.equal(shuffled(world.label, 1)[tested], dealt[0][tested])


def test_the_worlds_oracle_scores_are_its_labels(world: World) -> None:
    policy = make_policy("oracle")
    table = world.fill(policy, LENGTH)
    found = by_token(policy.score(world.view(policy, table)), table.tokens)[0, 0]
    assert torch.equal(found, world.label.nan_to_num(0))
