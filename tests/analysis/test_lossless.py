"""Smallest budgets that keep an answer: outcomes over a grid, written out."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfkv.analysis.lossless import lossless_budgets, lossless_summary
from cfkv.errors import CfkvError
from cfkv.schemas import LOSSLESS_BUDGETS

from .evaluation_rows import arm, row, table

GRID = (32, 64, 128, 256)


def grid(policy, outcomes, trace=0, **changes):
    """One trace over the budgets of GRID: 1 right, 0 wrong, None failed without knowing its slots."""
    made = []
    for budget, outcome in zip(GRID, outcomes, strict=False):
        failed = {} if outcome is not None else {"status": "out_of_memory", "slots": None}
        correct = None if outcome is None else bool(outcome)
        made.append(row(trace, policy, str(budget), correct=correct, **failed, **changes))
    return made


FULL = arm("full", "all", [1])


@pytest.mark.parametrize(
    ("outcomes", "slots", "any_slots", "monotone", "reason"),
    [
        ([0, 0, 1, 1], 128, 128, True, None),
        ([1, 1, 1, 1], 32, 32, True, None),
        ([0, 0, 0, 1], 256, 256, True, None),
        # Right by luck at 32: the headline does not count it.
        ([1, 0, 1, 1], 128, 32, False, None),
        ([1, 1, 1, 0], None, 32, False, "lost at the largest budget, 256"),
        ([0, 0, 0, 0], None, None, True, "lost at the largest budget, 256"),
        # A failure at 64 ends the run from above.
        ([1, None, 1, 1], 128, 32, True, None),
        ([1, 1, 1, None], None, 32, True, "unknown at the largest budget, 256"),
        ([None, None, None, None], None, None, None, "no budget with a verdict"),
    ],
)
def test_by_hand(outcomes, slots, any_slots, monotone, reason):
    frame = lossless_budgets(table(FULL, grid("h2o", outcomes)))
    (found,) = frame.to_dicts()
    assert (found["slots"], found["budget"]) == (slots, None if slots is None else str(slots))
    assert (found["any_slots"], found["any_budget"]) == (
        any_slots,
        None if any_slots is None else str(any_slots),
    )
    assert (found["monotone"], found["reason"]) == (monotone, reason)
    assert found["n_unknown"] == outcomes.count(None)
    assert found["n_budgets"] == 4 - outcomes.count(None)


def test_only_traces_that_full_answers_right_are_asked():
    traces = [*grid("h2o", [0, 1, 1, 1], 0), *grid("h2o", [1, 1, 1, 1], 1), *grid("h2o", [1, 1, 1, 1], 2)]
    evaluations = table(arm("full", "all", [1, 0]), traces)
    found = lossless_budgets(evaluations)
    assert found["slots"].to_list() == [64, None, None]
    assert found["reason"].to_list() == [None, "full is wrong", "no verdict of full"]
    assert found.to_arrow().schema.names == LOSSLESS_BUDGETS.schema.names
    assert lossless_budgets(evaluations, need_full=False)["slots"].to_list() == [64, 32, 32]


def test_several_samples_are_held_against_full():
    """Full is right 1 of 2; at 64 the policy is right 1 of 2, at 32 never."""
    rows = [
        row(0, policy, budget, correct=bool(outcome), sample_index=sample)
        for policy, budget, outcomes in (
            ("full", "all", (1, 0)),
            ("h2o", "32", (0, 0)),
            ("h2o", "64", (0, 1)),
        )
        for sample, outcome in enumerate(outcomes)
    ]
    assert lossless_budgets(table(rows))["slots"].to_list() == [64]


def test_fractions_are_ordered_by_their_slots_in_the_trace():
    """100% is 90 slots here and lies above 64; a failed 50% finds its place by the other policy's 45."""
    rows = [
        *FULL,
        row(0, "h2o", "100%", correct=True, slots=90),
        row(0, "h2o", "64", correct=False),
        row(0, "h2o", "50%", correct=None, slots=None, status="out_of_memory"),
        row(0, "knorm", "50%", correct=True, slots=45),
    ]
    found = lossless_budgets(table(rows)).sort("policy").to_dicts()
    assert (found[0]["slots"], found[0]["budget"], found[0]["n_unknown"]) == (90, "100%", 1)
    assert (found[1]["slots"], found[1]["budget"]) == (45, "50%")


def test_a_failure_of_unknown_size_claims_nothing():
    rows = [
        *FULL,
        *grid("h2o", [1, 1]),
        row(0, "h2o", "9MiB", correct=None, slots=None, status="out_of_memory"),
    ]
    (found,) = lossless_budgets(table(rows)).to_dicts()
    assert (found["slots"], found["reason"]) == (None, "unknown at the largest budget, 9MiB")


def test_equal_slots_are_one_budget():
    rows = [*FULL, *grid("h2o", [1, 1]), row(0, "h2o", "80%", correct=False, slots=32)]
    (found,) = lossless_budgets(table(rows)).to_dicts()
    assert (found["slots"], found["n_budgets"]) == (64, 2)


def test_summary_by_hand():
    """h2o: 64, 128, none and one not asked; the oracle: 32, 128, 32."""
    outcomes = {
        "h2o": ([0, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]),
        "oracle": ([1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]),
    }
    rows = [
        grid(policy, found, trace)
        for policy, traces in outcomes.items()
        for trace, found in enumerate(traces)
    ]
    lossless = lossless_budgets(table(arm("full", "all", [1, 1, 1, 0]), *rows))
    h2o, oracle = lossless_summary(lossless).to_dicts()
    assert (h2o["n_traces"], h2o["n_found"], h2o["share"]) == (3, 2, pytest.approx(2 / 3))
    # 64, 128, above the grid.
    assert h2o["median_slots"] == 128
    # 64, 128, 32.
    assert h2o["median_any_slots"] == 64
    assert h2o["n_not_monotone"] == 1
    # 64 / 32 and 128 / 128: median 1.5; the third trace has no budget under h2o.
    assert (h2o["ratio_to_oracle"], h2o["n_ratio"]) == (1.5, 2)
    assert (oracle["ratio_to_oracle"], oracle["n_ratio"], oracle["share"]) == (1.0, 3, 1.0)
    without = lossless_summary(lossless, oracle="elsewhere").to_dicts()[0]
    assert (math.isnan(without["ratio_to_oracle"]), without["n_ratio"]) == (True, 0)


def test_a_median_above_the_grid_is_no_number():
    rows = [
        grid("h2o", outcomes, trace)
        for trace, outcomes in enumerate(([0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]))
    ]
    (found,) = lossless_summary(lossless_budgets(table(arm("full", "all", [1, 1, 1]), *rows))).to_dicts()
    assert math.isnan(found["median_slots"])
    assert found["n_found"] == 1


def test_an_oracle_of_several_settings_is_refused():
    rows = [grid("oracle", [1, 1], parameters=f"kind={kind}") for kind in ("a", "b")]
    with pytest.raises(CfkvError, match="'oracle' has the parameters 'kind=a', 'kind=b' in mode 'forced'"):
        lossless_summary(lossless_budgets(table(FULL, *rows)))


def test_summary_of_nothing():
    assert lossless_summary(lossless_budgets(table())).height == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, None]), min_size=4, max_size=4))
def test_the_headline_is_never_below_the_plain_minimum(outcomes):
    (found,) = lossless_budgets(table(FULL, grid("h2o", outcomes))).to_dicts()
    if found["slots"] is not None:
        assert found["any_slots"] <= found["slots"]
        assert all(outcome == 1 for outcome in outcomes[GRID.index(found["slots"]) :])
        if found["monotone"] and not found["n_unknown"]:
            assert found["any_slots"] == found["slots"]
    else:
        assert found["reason"]
