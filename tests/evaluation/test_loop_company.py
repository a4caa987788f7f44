"""Who shares a batch, in what order, when rows leave, and which slots were used before: no answer depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import ClassVar

import pytest
import torch
from budgeted import PROMPT, SLOTS, TOTAL, draw, keep_sets, read, same_tokens, small, task
from torch import Tensor

from cfkv.evaluation._loop import decode
from cfkv.evaluation._reading import Reading
from cfkv.evaluation._row import Outcome, Task
from cfkv.models.decode import generate_greedy
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import Policy, Schedule, Seen, State, View, parameters, policy_kinds
from cfkv.policies._budget import Budget

NAMES = policy_kinds.names()
RAGGED = [name for name in NAMES if small(name).ragged]
Tiny = Callable[[str, str], LoadedModel]


@pytest.fixture(scope="module")
def arms(llama: LoadedModel) -> Reading:
    """One prompt, read for all policies at once."""
    return read(llama, [small(name) for name in NAMES], draw(llama, TOTAL), PROMPT + 24)


def arm(reading: Reading, name: str, fed: Sequence[int] = (), **options: object) -> Task:
    """The text of `reading` under a policy of it; generates 12 tokens unless told otherwise."""
    ids = [*reading.ids[0, : reading.length].tolist(), *fed]
    index = [policy.name for policy in reading.policies].index(name)
    settings = {"max_new_tokens": 12, "record": True, **options}
    return task(reading, index, ids, Budget(slots=SLOTS), **settings)


def assert_same(found: Outcome, expected: Outcome, ids: Sequence[int], what: str) -> int:
    """The same keep sets and tokens; returns 1 where a near-tie excused a difference.

    The same token twice has the same key norm on layer 0, but for rounding: which of them goes first is a tie.
    """
    if not same_tokens(found, expected, what):
        return 1
    text = [*ids, *expected.token_ids]
    for one, two in zip(keep_sets(found), keep_sets(expected), strict=True):
        assert one[:3] == two[:3], what
        if one[3] != two[3]:
            only = [sorted(text[place] for place in {*a} - {*b}) for a, b in permutations((one[3], two[3]))]
            assert only[0] == only[1], f"{what}: {one} instead of {two}"
            return 1
    assert (found.status, found.finish_reason) == (expected.status, expected.finish_reason), what
    assert found.kept_mean == pytest.approx(expected.kept_mean), what
    return 0


def greedy(loaded: LoadedModel, ids: Sequence[int], count: int) -> Outcome:
    (plain,) = generate_greedy(
        loaded, [ids], max_new_tokens=[count], stops=[lambda ids: None], chunk_size=512
    )
    return Outcome(token_ids=plain.token_ids, min_margin=plain.min_margin)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3"])
def test_a_budget_of_the_whole_text_is_plain_greedy_decoding(
    family: str, kernel: str, make_tiny: Tiny
) -> None:
    """All policies as arms of one batch."""
    loaded = make_tiny(family, kernel)
    ids = draw(loaded, 50)
    reading = read(loaded, [small(name) for name in NAMES], ids, 50)
    budget = Budget(slots=74)
    found = decode([task(reading, i, ids, budget, max_new_tokens=24) for i in range(len(NAMES))], 64)
    plain, excused = greedy(loaded, ids, 24), 0
    for name, outcome in zip(NAMES, found, strict=True):
        assert outcome.status == "ok", outcome.reason
        assert outcome.evictions == 0
        excused += not same_tokens(outcome, plain, f"{name} on {family}")
    assert excused == 0


def test_a_budget_of_the_whole_text_is_plain_greedy_decoding_of_the_builtin_model(
    builtin: LoadedModel,
) -> None:
    """Alone, with a reading of its own; the slots are as many as the text needs."""
    ids = draw(builtin, 45)
    plain = greedy(builtin, ids, 16)
    for name in NAMES:
        reading = read(builtin, [small(name)], ids, 45)
        (found,) = decode([task(reading, 0, ids, Budget(slots=61), max_new_tokens=16)], 1)
        assert found.evictions == 0
        assert same_tokens(found, plain, name), f"{name}: a near-tie at {found.min_margin}"


def test_order_size_and_company_of_a_batch_change_nothing(llama: LoadedModel, arms: Reading) -> None:
    """Alone with a reading of its own, against batches of 3 and 16 of all policies, of two texts, in any order."""
    ids = draw(llama, TOTAL)
    fed = ids[PROMPT + 24 : PROMPT + 44]
    other = read(llama, [small(name) for name in NAMES], draw(llama, 30, seed=9), 30)
    alone = {}
    for name in NAMES:
        reading = read(llama, [small(name)], ids, PROMPT + 24)
        (alone[name],) = decode([arm(reading, name, fed)], 1)
        assert alone[name].status == "ok"
        assert alone[name].keep_sets or name == "full"
    excused = 0
    for size, seed in ((3, 0), (16, 1), (16, 2)):
        order = torch.randperm(len(NAMES), generator=torch.Generator().manual_seed(seed)).tolist()
        tasks = [arm(arms, NAMES[index], fed) for index in order]
        company = [
            arm(other, NAMES[index], fed[index % 7 :], max_new_tokens=index % 5) for index in order[::4]
        ]
        found = decode([*tasks, *company], size)
        for index, outcome in zip(order, found, strict=False):
            excused += assert_same(outcome, alone[NAMES[index]], ids, f"{NAMES[index]} in batches of {size}")
    print(f"{excused} excused by a near-tie")
    assert excused <= 3


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*RAGGED, "streaming_llm_rerotated")])
def test_a_slot_that_is_used_again_remembers_nothing(name: str, llama: LoadedModel, arms: Reading) -> None:
    """The simulated run never uses a slot twice; the rotated keys have no simulated run."""
    fed = draw(llama, TOTAL)[PROMPT + 24 :]
    reused, fresh = (decode([arm(arms, name, fed, simulate=simulate)], 1)[0] for simulate in (False, True))
    assert (reused.eviction, fresh.eviction) == ("physical", "simulated")
    assert assert_same(reused, fresh, draw(llama, TOTAL), name) == 0


def test_rows_that_end_early_change_nothing_for_the_others(llama: LoadedModel, arms: Reading) -> None:
    """Rows leave at many moments, in the middle of a cycle of 16 too, when freed slots lie at the table's end."""
    ids = draw(llama, TOTAL)
    fed = ids[PROMPT + 24 :]
    alone = {name: decode([arm(arms, name, fed)], 1)[0] for name in NAMES}
    short = draw(llama, 12, seed=4)
    brief = read(llama, [small("streaming_llm")], short, 12)
    excused = 0
    for leaving in (2, 17, 19, 25, 33):
        company = [
            task(brief, 0, [*short, *fed[: leaving + extra]], Budget(slots=SLOTS)) for extra in (0, 0, 1, 3)
        ]
        names = NAMES[leaving % 4 :: 4]
        for name in names:
            ran = decode([*company, arm(arms, name, fed)], 16)
            excused += assert_same(ran[-1], alone[name], ids, f"{name}, others leave at {leaving}")
    assert excused <= 2


@parameters
class Oldest(Policy):
    """Keeps what came first, so that the newest slots are freed, sixteen at a time."""

    observes: ClassVar[tuple[str, ...]] = ("attention",)
    state: ClassVar[dict[str, float]] = {"mass": 0.0}
    name: ClassVar[str] = "oldest"

    @property
    def schedule(self) -> Schedule:
        return Schedule("every_m", 16)

    def observe(self, state: State, seen: Seen) -> None:
        mass = seen["attention"].sum(dim=(0, 1, 2))
        assert float(mass[~seen.valid[0, 0]].sum()) == 0
        state.columns["mass"] += mass

    def score(self, view: View) -> Tensor:
        return -view.positions.float()


def test_attention_is_zero_in_slots_that_hold_nothing(llama: LoadedModel) -> None:
    """Also after a row left while the freed slots lay behind the last in use: the cache shrinks there."""
    ids = draw(llama, TOTAL)
    reading = read(llama, [Oldest(), small("streaming_llm")], ids, 40)
    for steps in range(12, 20):
        company = task(reading, 1, ids[: 40 + steps], Budget(slots=20))
        _, found = decode([company, task(reading, 0, ids, Budget(slots=24))], 2)
        assert found.evictions == 5
