"""Who does which part: one owner each, and loads that were added up by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfkv.config import Execution
from cfkv.errors import CfkvError
from cfkv.workers import Workers, check_placement, owner, workers

Length = Callable[[int], int]


def loads(lengths: list[int], count: int) -> list[int]:
    """What each of `count` processes has to do, sorted."""
    found: Counter[int] = Counter()
    for part, length in enumerate(lengths):
        found[owner(part, count)] += length
    return sorted(found[process] for process in range(count))


def round_robin(lengths: list[int], count: int) -> list[int]:
    """The same if process i had the parts i, i + count, ..."""
    return sorted(sum(lengths[process::count]) for process in range(count))


def test_the_share_is_read_from_launcher_and_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 2 of 3 with 4 processes each: process 1 of it is 2 * 4 + 1 = 9 of 12."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert workers() == Workers(0, 1, 0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    crew = workers("2/3")
    assert (crew.index, crew.count, crew.speaks) == (9, 12, False)
    for shard in ("3/3", "0/0", "1", "a/b", "-1/2"):
        with pytest.raises(
            CfkvError, match=f"--shard '{shard}' is not i/n with i below n; the shards of four jobs"
        ):
            workers(shard)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 500))
def test_each_part_has_one_owner(world_size: int, shards: int, part: int) -> None:
    """And it is in the shard that says so."""
    crews = [
        Workers(rank, world_size, shard, shards) for shard in range(shards) for rank in range(world_size)
    ]
    assert [crew.index for crew in crews] == list(range(world_size * shards))
    (mine,) = [crew for crew in crews if crew.owns(part)]
    assert [crew.shard for crew in crews if crew.shard_owns(part)] == [mine.shard] * world_size


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_each_round_deals_one_part_to_each(count: int) -> None:
    """So that nobody has two parts more than another, wherever the plan ends."""
    for first in range(0, 60 * count, count):
        dealt = [owner(part, count) for part in range(first, first + count)]
        assert sorted(dealt) == list(range(count))


def test_the_dealing_stays_as_it_is() -> None:
    """Jobs of one run that dealt otherwise would leave parts to each other; two pairs of rounds each."""
    assert [owner(part, 2) for part in range(8)] == [0, 1, 1, 0, 1, 0, 0, 1]
    assert [owner(part, 4) for part in range(16)] == [2, 1, 0, 3, 3, 0, 1, 2, 0, 3, 2, 1, 1, 2, 3, 0]


# 4 processes. Lengths 1 to 32 add up to 528, and 132 each is a fair share; round robin gives process i
# (i + 1) + (i + 5) + ... + (i + 29) = 8 * (i + 1) + 112. With long parts of 9 and short ones of 1, 32 parts of
# period 2 add up to 160, and round robin gives two processes 8 * 9 and two 8 * 1; of period 4 to 8 * 9 + 24 = 96,
# and one process has all the long ones.
@pytest.mark.parametrize(
    ("length", "naive", "fair"),
    [
        (lambda part: part + 1, [120, 128, 136, 144], 132),
        (lambda part: 32 - part, [120, 128, 136, 144], 132),
        (lambda part: 9 if part % 2 else 1, [8, 8, 72, 72], 40),
        (lambda part: 9 if part % 4 == 0 else 1, [8, 8, 8, 72], 24),
        (lambda part: 9 if part % 4 == 3 else 1, [8, 8, 8, 72], 24),
        (lambda part: 9 if part % 8 == 5 else 1, [8, 8, 8, 40], 16),
    ],
    ids=["rising", "falling", "period 2", "first of 4", "last of 4", "sixth of 8"],
)
def test_loads_by_hand(length: Length, naive: list[int], fair: int) -> None:
    lengths = [length(part) for part in range(32)]
    assert round_robin(lengths, 4) == naive
    assert loads(lengths, 4) == [fair] * 4


@pytest.mark.parametrize("rounds", [2, 4, 10])
@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_a_slope_is_fair_after_every_pair_of_rounds(count: int, rounds: int) -> None:
    """The seats s and count - 1 - s of two rounds add up to the same for every s."""
    total = count * rounds
    fair = total * (total + 1) // 2 // count
    assert loads(list(range(1, total + 1)), count) == [fair] * count
    assert loads(list(range(total, 0, -1)), count) == [fair] * count


def test_a_short_run_of_a_long_period() -> None:
    """8 processes, 4 rounds, one long part in each: 4 for one process in turn, at most 2 when dealt in this way.

    A process has a seat once in the two first rounds of the pairs and once in the two mirrored ones.
    """
    lengths = [1 if part % 8 == 0 else 0 for part in range(32)]
    assert round_robin(lengths, 8)[-1] == 4
    assert loads(lengths, 8)[-1] <= 2


@pytest.mark.parametrize("period", [3, 5, 6, 7, 9, 12, 24, 40, 100])
def test_no_other_period_locks_on(period: int) -> None:
    """8 processes, 400 rounds: the most long parts that one gets are what lots drawn by chance would give it.

    That is n / 8 of n on average, with a variance of n * 1/8 * 7/8; three and a half deviations are the bound.
    Round robin gives one process all of them at period 24 and 40.
    """
    lengths = [1 if part % period == 0 else 0 for part in range(3200)]
    long = sum(lengths)
    bound = long / 8 + 3.5 * math.sqrt(long * 7) / 8
    assert loads(lengths, 8)[-1] < bound
    if period in (24, 40):
        assert round_robin(lengths, 8)[-1] == long > bound


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (
            {"device_map": "cuda:1"},
            "--device-map 'cuda:1' is none of auto, balanced, balanced_low_0, sequential",
        ),
        ({"device_map": ""}, "--device-map '' is none of auto"),
        ({"device_map": "auto", "device": "cpu"}, "and --device cpu names one: leave one of them out"),
    ],
)
def test_a_placement_that_cannot_be_meant(execution: dict[str, str], message: str) -> None:
    with pytest.raises(CfkvError) as caught:
        check_placement(Execution(**execution))
    assert message in str(caught.value)


def test_processes_of_one_machine_do_not_all_spread_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several nodes with one process each may; and without --device-map, anybody."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_placement(Execution(device_map="auto"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_placement(Execution(device="cpu"))
    with pytest.raises(CfkvError, match="all GPUs of its machine, and 2 were started on this one: start one"):
        check_placement(Execution(device_map="auto"))
