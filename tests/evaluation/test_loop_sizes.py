"""Any length of prompt, text and budget: counts, tables, and the end of a row."""

from __future__ import annotations

from typing import Any

import pytest
from budgeted import (
    PROMPT,
    SLOTS,
    TOTAL,
    draw,
    keep_sets,
    never_stop,
    read,
    small,
    task,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Outcome, Task
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import View, policy_kinds
from cfkv.policies._budget import Budget

NAMES = policy_kinds.names()


@pytest.fixture(scope="module")
def recorded(llama: LoadedModel) -> dict[str, Outcome]:
    """All policies on one text: the prompt is compressed, then forty tokens are fed and five generated."""
    ids = draw(llama, TOTAL)
    reading = read(llama, [small(name) for name in NAMES], ids, 70)
    tasks = [
        task(reading, i, ids, Budget(slots=SLOTS), max_new_tokens=5, record=True) for i in range(len(NAMES))
    ]
    return dict(zip(NAMES, decode(tasks, 64), strict=True))


def test_what_is_evicted_is_counted_by_hand(recorded: dict[str, Outcome]) -> None:
    """70 read, 44 fed: 54 tokens go one by one, the first ten at once."""
    assert recorded["h2o"].evicted == pytest.approx(70 + 44 - SLOTS)
    assert recorded["h2o"].steps == 44
    # Every 16 generated tokens: at 70 (read), then when (step - 70) % 16 == 0 above the budget.
    steps = sorted({step for *_, step, _ in keep_sets(recorded["r_kv"])})
    assert steps == [70, 86, 102]
    assert recorded["r_kv"].kept_peak == SLOTS + 15
    assert recorded["full"].kept_peak == 114
    assert recorded["full"].peak_bytes == 2 * 3 * 2 * 8 * 4 * 115


def test_a_budget_may_prove_too_small_in_the_middle(llama: LoadedModel) -> None:
    """32 recent tokens are protected, but a context of 10 does not show that yet: the 21st token does."""
    ids = draw(llama, 60)
    reading = read(llama, [small("ahakv"), small("tova")], ids, 10)
    fine = task(reading, 1, ids, Budget(slots=20), max_new_tokens=8)
    (alone,) = decode([fine], 1)
    failed, other = decode([task(reading, 0, ids, Budget(slots=20)), fine], 2)
    assert failed.status == "budget_too_small"
    assert "20 tokens is not above the 21" in str(failed.reason)
    assert failed.steps == 10
    assert other.token_ids == alone.token_ids


def test_the_table_and_the_keep_sets_agree(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a policy is shown at each eviction is what the last keep set left and what came since."""
    ids = draw(llama, TOTAL)
    for name in ("h2o", "tova", "streaming_llm", "r_kv", "raas", "lazy_eviction"):
        shown: list[Tensor] = []
        kind = policy_kinds.get(name)
        score = kind.score

        def watching(self: Any, view: View, score: Any = score, shown: list[Tensor] = shown) -> Tensor:
            shown.append(view.positions.masked_fill(~view.valid, -1).clone())
            return score(self, view)

        monkeypatch.setattr(kind, "score", watching)
        reading = read(llama, [small(name)], ids, PROMPT)
        (outcome,) = decode([task(reading, 0, ids, Budget(slots=50), record=True)], 1)
        before: dict[tuple[int, int], tuple[int, set[int]]] = {}
        moments = sorted({keep.step for keep in outcome.keep_sets})
        assert len(shown) == len(moments)
        for layer, head, step, kept in keep_sets(outcome):
            last, earlier = before.get((layer, head), (PROMPT, {*range(PROMPT)}))
            table = shown[moments.index(step)][max(layer, 0), max(head, 0)].tolist()
            assert sorted(place for place in table if place >= 0) == sorted(earlier | {*range(last, step)})
            before[layer, head] = step, {*kept}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    context=st.integers(1, 60),
    fed=st.integers(0, 40),
    slots=st.integers(8, 70),
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
    size=st.integers(1, 4),
)
def test_any_sizes(
    context: int, fed: int, slots: int, names: list[str], size: int, llama: LoadedModel
) -> None:
    """Ends with a status; at "ok" the tokens are there, nothing is above the budget after an eviction."""
    ids = draw(llama, context + fed, seed=context)
    reading = read(llama, [small(name) for name in names], ids, context)
    budget = Budget(slots=slots)
    tasks = [task(reading, i, ids, budget, max_new_tokens=6, record=True) for i in range(len(names))]
    for name, outcome in zip(names, decode(tasks, size), strict=True):
        policy = small(name)
        assert outcome.status in ("ok", "budget_too_small", "never_evicted"), outcome.reason
        if outcome.status == "budget_too_small":
            most = max(
                policy.protection(slots, min(PROMPT, context), s).count(PROMPT, s) for s in (context, 110)
            )
            assert slots <= most
            continue
        assert len(outcome.token_ids) == 6
        assert outcome.steps == fed + 5
        assert outcome.kept_sum <= outcome.steps * (context + fed + 5)
        if policy.schedule.kind != "never" and not policy.ragged:
            assert all(len(kept) <= slots for *_, kept in keep_sets(outcome))
        if context + fed + 5 <= slots:
            assert outcome.evictions == 0


def test_a_task_of_nothing(llama: LoadedModel) -> None:
    """Nothing fed and nothing to generate is no error."""
    reading = read(llama, [small("h2o")], draw(llama, 30), 30)
    (outcome,) = decode([Task(reading=reading, index=0, budget=None, max_new_tokens=0, stop=never_stop)], 1)
    assert (outcome.token_ids, outcome.steps, outcome.kept_mean, outcome.status) == ([], 0, None, "ok")
