"""Accuracy and paired comparisons by hand, against brute force, and by what must not matter."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from cfkv.analysis.compare import mcnemar_pvalue, policy_accuracy, policy_comparisons
from cfkv.analysis.intervals import wilson_interval
from cfkv.analysis.multiplicity import adjust
from cfkv.analysis.resampling import bootstrap_mean, sorts_of_clusters
from cfkv.errors import CfkvError
from cfkv.schemas import POLICY_ACCURACY, POLICY_COMPARISONS

from .evaluation_rows import arm, row, table

NAN = math.nan
DRAWS = 500


def one(frame, **where):
    """The only row of the frame with these values."""
    found = frame.filter(**where)
    assert found.height == 1, found
    return found.row(0, named=True)


def accuracy(*parts, **settings):
    return policy_accuracy(table(*parts), draws=DRAWS, **settings)


def compared(*parts, **settings):
    return policy_comparisons(table(*parts), draws=DRAWS, **settings)


# ---- accuracy


def test_accuracy_by_hand():
    """Ten traces: 6 right, 2 wrong (one at the cap and silent), 1 failed, 1 without a verdict (grader's timeout)."""
    rows = arm("h2o", "64", [1] * 6 + [0, 0, None, 1])
    rows[7] |= {"finish_reason": "length", "answered": False, "verdict": "unanswered", "kept_peak": 70.0}
    rows[9] |= {"correct": None, "verdict": "timeout", "kept_mean": 49.0}
    found = one(accuracy(rows))
    assert found["n_rows"] == 10
    assert (found["n_graded"], found["n_failed"], found["n_ungraded"]) == (8, 1, 1)
    assert (found["n_items"], found["n_problems"], found["n_ran"]) == (8, 8, 9)
    assert found["accuracy"] == 0.75
    # Wilson of 6 of 8.
    wilson = wilson_interval(6, 8)
    assert (found["low"], found["high"], found["method"]) == (wilson.low, wilson.high, "wilson")
    # 6 right of the 7 graded that did not stop at the cap.
    assert (found["n_completed"], found["accuracy_completed"]) == (7, pytest.approx(6 / 7))
    # One of the nine that ran.
    assert (found["n_capped"], found["cap_rate"]) == (1, pytest.approx(1 / 9))
    assert (found["n_unanswered"], found["unanswered_rate"]) == (1, pytest.approx(1 / 9))
    assert found["n_timeouts"] == 1
    # (8 * 40 + 49) / 9 = 41.
    assert (found["kept_mean"], found["kept_peak"]) == (41.0, 70.0)
    assert (found["evictions"], found["evicted"]) == (30.0, 46.0)
    assert (found["eviction"], found["slots_mean"], found["peak_bytes"]) == ("physical", 64.0, 4096)
    assert found["nan_reason"] is None


def test_the_table_is_as_declared():
    rows = [arm("h2o", "64", [1, 0]), arm("full", "all", [1, 1])]
    assert accuracy(*rows).to_arrow().schema.names == POLICY_ACCURACY.schema.names
    assert compared(*rows).to_arrow().schema.names == POLICY_COMPARISONS.schema.names
    empty = table()
    for made, declared in (
        (policy_accuracy(empty), POLICY_ACCURACY),
        (policy_comparisons(empty), POLICY_COMPARISONS),
    ):
        assert made.height == 0
        assert made.to_arrow().cast(declared.schema).schema == declared.schema


def test_nothing_is_not_zero():
    """All failed: no accuracy, no rates, no costs, and reasons."""
    found = one(accuracy(arm("h2o", "64", [None, None])))
    assert (found["n_rows"], found["n_failed"], found["n_graded"], found["n_problems"]) == (2, 2, 0, 0)
    numbers = ("accuracy", "low", "high", "accuracy_completed", "cap_rate", "unanswered_rate", "kept_mean")
    for name in (*numbers, "kept_peak", "evictions", "evicted", "seconds_per_token"):
        assert math.isnan(found[name]), name
    assert (found["nan_reason"], found["cost_reason"]) == ("no graded rows", "no row ran")
    assert (found["peak_bytes"], found["eviction"], found["method"]) == (None, None, "none")


def test_skipped_rows_are_not_failures():
    rows = arm("h2o", "64", [1, 0, 0])
    rows[2] |= {"status": "skipped", "correct": None, "finish_reason": None, "answered": None}
    found = one(accuracy(rows))
    assert (found["n_failed"], found["n_ungraded"], found["n_ran"], found["accuracy"]) == (0, 1, 2, 0.5)


def test_several_samples_use_the_bootstrap_over_problems():
    """Three traces of two problems, two samples each: p000 has 3 right of 4, p001 1 of 2."""
    rows = []
    for trace, problem, outcomes in (("a", "p000", (1, 1)), ("b", "p000", (1, 0)), ("c", "p001", (0, 1))):
        for sample, outcome in enumerate(outcomes):
            rows.append(
                row(trace, "h2o", "64", correct=bool(outcome), problem_id=problem, sample_index=sample)
            )
    found = one(accuracy(rows))
    # 4 of 6 rows; a resample has p000 twice (6/8), p001 twice (2/4), or both (4/6).
    assert (found["accuracy"], found["method"]) == (pytest.approx(4 / 6), "bootstrap")
    assert (found["n_items"], found["n_problems"], found["n_graded"]) == (3, 2, 6)
    assert (found["low"], found["high"]) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("outcomes", "method", "interval", "reason"),
    [
        # All right: no resample differs, so Wilson of 3 problems of 3.
        (((1, 1), (1, 1), (1, 1)), "wilson", (wilson_interval(3, 3).low, 1.0), None),
        (((0, 0), (0, 0)), "wilson", (0.0, wilson_interval(0, 2).high), None),
        (((1, 0), (0, 1)), "none", (NAN, NAN), "every problem has the same value: no resample differs"),
        (((1, 0),), "none", (NAN, NAN), "fewer than 2 problems"),
    ],
)
def test_where_no_resample_differs(outcomes, method, interval, reason):
    rows = [
        row(trace, "h2o", "64", correct=bool(outcome), sample_index=sample)
        for trace, pair in enumerate(outcomes)
        for sample, outcome in enumerate(pair)
    ]
    found = one(accuracy(rows))
    assert found["accuracy"] == np.mean(outcomes)
    assert found["method"] == method
    assert (found["low"], found["high"]) == pytest.approx(interval, nan_ok=True)
    assert found["nan_reason"] == reason


def test_seconds_are_those_of_the_steps():
    """50 steps in 2 s, twice: 4 / 100. A row without a step has no time that could be shared out."""
    assert one(accuracy(arm("h2o", "64", [1, 0])))["seconds_per_token"] == pytest.approx(4 / 100)
    mixed = arm("h2o", "64", [1]) + arm("h2o", "64", [1, 0], n_steps=0)[1:]
    assert one(accuracy(mixed))["seconds_per_token"] == pytest.approx(2 / 50)
    found = one(accuracy(arm("h2o", "64", [1, 0], n_steps=0)))
    assert math.isnan(found["seconds_per_token"])
    assert found["cost_reason"].startswith("no token was fed one at a time")
    assert found["peak_bytes"] == 4096


@pytest.mark.parametrize(
    ("kinds", "kind", "costs"),
    [
        (("physical", "physical"), "physical", True),
        (("none", "none"), "none", True),
        (("none", "physical"), "physical", True),
        (("simulated", "none"), "simulated", False),
        (("simulated", "physical"), "mixed", False),
    ],
)
def test_kinds_of_eviction(kinds, kind, costs):
    rows = [
        {**entry, "eviction": name}
        for entry, name in zip(arm("h2o", "64", [1, 0], mode="free"), kinds, strict=True)
    ]
    found = one(accuracy(rows))
    assert found["eviction"] == kind
    assert math.isnan(found["seconds_per_token"]) != costs
    assert (found["peak_bytes"] is None) != costs
    assert found["cost_reason"] == (None if costs else "eviction is simulated by masks")


def test_a_row_that_occurs_twice_is_refused():
    rows = arm("h2o", "64", [1, 0])
    with pytest.raises(CfkvError, match="'trace_id': 't001', 'sample_index': 0} occurs more than once; pass"):
        policy_accuracy(table(rows, rows[1:]))


# ---- McNemar


@pytest.mark.parametrize(
    ("wins", "losses", "pvalue"),
    [
        (6, 1, 0.125),  # 2 (C(7,0) + C(7,1)) / 2^7 = 2 * 8 / 128
        (1, 6, 0.125),
        (5, 0, 0.0625),  # 2 * 1 / 2^5
        (6, 0, 0.03125),  # the fewest wins that are significant: 2 / 2^6
        (10, 2, 0.03857421875),  # 2 (1 + 12 + 66) / 2^12 = 158 / 4096
        (3, 3, 1.0),
        (1, 0, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_by_hand(wins, losses, pvalue):
    assert mcnemar_pvalue(wins, losses) == pytest.approx(pvalue, abs=1e-15)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_twice_the_smaller_tail(wins, losses):
    expected = min(1.0, 2 * binom.cdf(min(wins, losses), wins + losses, 0.5)) if wins + losses else 1.0
    assert mcnemar_pvalue(wins, losses) == pytest.approx(expected)


def test_mcnemar_of_negative_counts():
    with pytest.raises(ValueError, match="wins = -1, losses = 2: counts are not negative"):
        mcnemar_pvalue(-1, 2)


# ---- comparisons


def test_comparison_by_hand():
    """Of 12 traces one failed under the policy, one under full, one is of the policy alone: 9 shared.

    full    1 1 1 1 1 1 0 0 0 | 1 F
    policy  0 0 0 0 1 1 1 0 0 | F 1 1
    One win, four losses, four ties: 3/9 against 6/9.
    """
    full = arm("full", "all", [1, 1, 1, 1, 1, 1, 0, 0, 0, 1, None])
    policy = arm("h2o", "64", [0, 0, 0, 0, 1, 1, 1, 0, 0, None, 1, 1])
    found = one(compared(full, policy), against="full")
    assert (found["n_items"], found["n_problems"]) == (9, 9)
    assert (found["n_dropped"], found["n_unshared"]) == (2, 1)
    assert (found["wins"], found["losses"], found["ties"]) == (1, 4, 4)
    assert (found["accuracy"], found["accuracy_against"]) == (pytest.approx(3 / 9), pytest.approx(6 / 9))
    assert found["difference"] == pytest.approx(-3 / 9)
    # 2 (C(5,0) + C(5,1)) / 2^5 = 12 / 32
    assert found["mcnemar_pvalue"] == pytest.approx(0.375)
    assert (found["test"], found["pvalue"], found["mcnemar_reason"]) == (
        "mcnemar",
        found["mcnemar_pvalue"],
        None,
    )
    assert found["low"] <= found["difference"] <= found["high"]
    assert found["nan_reason"] is None


def test_the_interval_is_that_of_brute_force_with_the_same_counts():
    """Problems of unequal size: each resample is written out item by item."""
    rng = np.random.default_rng(3)
    sizes = np.array([1, 2, 3, 1, 2, 1, 4, 1])
    sums = np.array([rng.integers(-size, size + 1) for size in sizes]).astype(float)
    found = bootstrap_mean(sums, sizes.astype(float), 400, np.random.default_rng(7), null=0.0)
    values, lengths, number = sorts_of_clusters(sums, sizes.astype(float))
    assert number.sum() == 8
    naive = []
    for counts in np.random.default_rng(7).multinomial(8, number / 8, size=400):
        drawn = [(v, n) for v, n, c in zip(values, lengths, counts, strict=True) for _ in range(c)]
        assert len(drawn) == 8
        naive.append(sum(v for v, _ in drawn) / sum(n for _, n in drawn))
    assert found.estimate == pytest.approx(sums.sum() / sizes.sum())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])))
    below, above = sum(x <= 0 for x in naive), sum(x >= 0 for x in naive)
    assert found.pvalue == pytest.approx(min(1, 2 * (1 + min(below, above)) / 401))


def test_sorts_of_clusters_leave_the_distribution_alone():
    """Drawing problem by problem, 20,000 times, gives the same quantiles up to noise of the draws."""
    rng = np.random.default_rng(0)
    sums = rng.integers(-1, 2, 60).astype(float)
    found = bootstrap_mean(sums, np.ones(60), 20_000, rng)
    naive = sums[rng.integers(0, 60, (20_000, 60))].mean(axis=1)
    # The standard error of the mean is below sqrt(1 / 60) = .13; a quantile of 20,000 draws is good to some .003.
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])), abs=0.02)


def test_mean_of_samples_is_paired_item_by_item():
    """Two samples each: .5 against 1, 1 against 0, .5 against .5; McNemar does not apply."""

    def rows(policy, budget, outcomes):
        return [
            row(trace, policy, budget, correct=bool(outcome), sample_index=sample)
            for trace, pair in enumerate(outcomes)
            for sample, outcome in enumerate(pair)
        ]

    full = rows("full", "all", [(1, 1), (0, 0), (1, 0)])
    policy = rows("h2o", "64", [(1, 0), (1, 1), (0, 1)])
    found = one(compared(full, policy), against="full")
    assert (found["wins"], found["losses"], found["ties"], found["n_items"]) == (1, 1, 1, 3)
    # (-.5 + 1 + 0) / 3
    assert found["difference"] == pytest.approx(0.5 / 3)
    assert math.isnan(found["mcnemar_pvalue"])
    assert found["mcnemar_reason"] == "several samples per item"
    assert (found["test"], found["pvalue"]) == ("bootstrap", found["bootstrap_pvalue"])
    # A sample that failed takes its item out: what is left of it would flatter.
    policy[0] |= {"correct": None, "status": "out_of_memory"}
    found = one(compared(full, policy), against="full")
    assert (found["n_items"], found["n_dropped"]) == (2, 1)


def test_several_traces_of_a_problem():
    rows = [
        row(trace, policy, budget, correct=bool(value), problem_id=f"p{trace // 2}")
        for policy, budget, outcomes in (("full", "all", [1, 1, 1, 1, 0]), ("h2o", "64", [0, 0, 1, 0, 0]))
        for trace, value in enumerate(outcomes)
    ]
    found = one(compared(rows), against="full")
    assert (found["n_items"], found["n_problems"]) == (5, 3)
    assert found["mcnemar_reason"] == "several items per problem"
    assert found["test"] == "bootstrap"
    # Resamples of p0 (-2 of 2), p1 (-1 of 2) and p2 (0 of 1): from three times p0 to three times p2.
    assert (found["low"], found["high"]) == (-1.0, 0.0)


@pytest.mark.parametrize(
    ("outcomes", "difference", "pvalue"), [([1, 0, 1], 0.0, 1.0), ([0, 0, 0], None, None)]
)
def test_equal_answers_have_no_interval(outcomes, difference, pvalue):
    full = arm("full", "all", outcomes if difference == 0 else [1, 1, 1])
    found = one(compared(full, arm("h2o", "64", outcomes)), against="full")
    assert math.isnan(found["low"])
    assert math.isnan(found["bootstrap_pvalue"])
    assert found["nan_reason"] == "every problem has the same value: no resample differs"
    # Three losses of three: 2 / 2^3.
    assert found["pvalue"] == (pvalue or 0.25)
    assert found["difference"] == (difference if difference is not None else -1.0)


def test_random_is_that_of_the_same_budget_and_mode():
    parts = [
        arm("full", "all", [1, 1, 1, 1]),
        arm("random", "64", [0, 0, 0, 0]),
        arm("random", "128", [1, 1, 0, 0]),
        arm("h2o", "64", [1, 1, 0, 0]),
        arm("h2o", "128", [1, 1, 1, 0]),
        arm("h2o", "256", [1, 1, 1, 1]),
        arm("h2o", "64", [1, 1, 1, 1], mode="free"),
    ]
    frame = compared(*parts)
    # h2o: three budgets and one free arm against both; random: two budgets against full.
    assert frame.height == 4 * 2 + 2
    forced = {"policy": "h2o", "mode": "forced"}
    assert one(frame, **forced, budget="64", against="random")["difference"] == 0.5
    assert one(frame, **forced, budget="128", against="random")["difference"] == 0.25
    lonely = one(frame, **forced, budget="256", against="random")
    assert lonely["nan_reason"] == "no arm random at this budget in this mode"
    assert (lonely["n_items"], lonely["test"]) == (0, "none")
    assert math.isnan(lonely["pvalue"])
    assert one(frame, mode="free", against="full")["nan_reason"] == "no arm full in this mode"


def test_positions_are_arms_of_their_own():
    """Full is absolute and serves both; random and the corrections are those of the same positions."""
    compact = {"positions": "compact"}
    parts = [
        arm("full", "all", [1, 1, 1, 1]),
        arm("random", "64", [0, 0, 0, 0]),
        arm("random", "64", [1, 1, 0, 0], **compact),
        arm("h2o", "64", [1, 1, 1, 0]),
        arm("h2o", "64", [1, 1, 1, 1], **compact),
    ]
    frame = compared(*parts)
    h2o = {"policy": "h2o", "positions": "compact"}
    assert one(frame, **h2o, against="random")["difference"] == 0.5
    assert one(frame, **h2o, against="full")["difference"] == 0.0
    assert one(frame, **h2o, against="full")["n_tests"] == 2
    assert one(frame, policy="h2o", positions="absolute", against="random")["difference"] == 0.75
    assert accuracy(*parts).height == 5


def test_a_baseline_with_several_settings():
    """The one with its defaults is taken; without it none is."""
    h2o = arm("h2o", "64", [1, 1, 0, 0])
    seeds = [arm("random", "64", [0, 0, 0, 0], parameters=f"seed={seed}") for seed in (1, 2)]
    default = arm("random", "64", [0, 0, 1, 0])
    found = one(compared(h2o, *seeds, default), policy="h2o", against="random")
    assert found["difference"] == 0.25
    found = one(compared(h2o, *seeds), policy="h2o", against="random")
    assert found["nan_reason"] == "several arms random at this budget in this mode"
    assert one(compared(h2o, seeds[0]), policy="h2o", against="random")["difference"] == 0.5


def test_no_shared_item():
    full = [row(trace, "full", "all", correct=True) for trace in (0, 1)]
    policy = [row(trace, "h2o", "64", correct=True) for trace in (2, 3, 4)]
    found = one(compared(full, policy), against="full")
    assert (found["n_items"], found["n_unshared"]) == (0, 5)
    assert found["nan_reason"] == "no item was graded in both arms"


def family(n=30):
    """Five policies at one budget that lose 1, 4, 6, 9 and 12 of 30 answers, and random that loses all."""
    lost = {"a": 1, "b": 4, "c": 6, "d": 9, "e": 12, "random": n}
    return [
        arm("full", "all", [1] * n),
        *(arm(name, "64", [0] * k + [1] * (n - k)) for name, k in lost.items()),
    ]


@pytest.mark.parametrize("correction", ["holm", "benjamini_hochberg"])
def test_corrected_within_mode_budget_and_baseline(correction):
    frame = compared(*family(), arm("a", "128", [0] * 3 + [1] * 27), correction=correction)
    against_full = frame.filter(against="full", budget="64").sort("pvalue")
    assert against_full["n_tests"].to_list() == [6] * 6
    raw = against_full["pvalue"].to_numpy()
    # Two-sided, k losses of k: 2^(1-k), at most 1.
    assert raw == pytest.approx([2.0 ** (1 - k) for k in (30, 12, 9, 6, 4, 1)])
    steps = raw * np.arange(6, 0, -1) if correction == "holm" else raw * 6 / np.arange(1, 7)
    if correction == "holm":
        expected = np.minimum(np.maximum.accumulate(steps), 1)
    else:
        expected = np.minimum(np.minimum.accumulate(steps[::-1])[::-1], 1)
    assert against_full["adjusted_pvalue"].to_numpy() == pytest.approx(expected)
    assert set(frame["correction"]) == {correction}
    # A family of its own: 2^(1-3) alone.
    assert one(frame, budget="128", against="full")["adjusted_pvalue"] == 0.25


def test_an_unknown_correction_is_refused():
    with pytest.raises(CfkvError, match="unknown correction 'holmes': did you mean 'holm'"):
        compared(arm("h2o", "64", [1, 0]), correction="holmes")
    assert adjust([0.01, NAN, 0.04], "holm").tolist() == pytest.approx([0.02, NAN, 0.04], nan_ok=True)


# ---- what must not matter

OUTCOMES = st.lists(
    st.tuples(st.sampled_from([0, 1, None]), st.sampled_from([0, 1, None])), min_size=1, max_size=14
)


@settings(max_examples=40, deadline=None)
@given(OUTCOMES, st.randoms(use_true_random=False))
def test_order_of_rows_plays_no_part_and_swapping_arms_turns_signs(outcomes, shuffler):
    left, right = ([pair[side] for pair in outcomes] for side in (0, 1))
    rows = [*arm("h2o", "64", left), *arm("random", "64", right)]
    swapped = [*arm("h2o", "64", right), *arm("random", "64", left)]
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    frame = compared(rows)
    assert frame.equals(compared(shuffled))
    assert accuracy(rows).equals(accuracy(shuffled))
    found, other = (one(made, against="random") for made in (frame, compared(swapped)))
    assert (found["wins"], found["losses"]) == (other["losses"], other["wins"])
    assert found["mcnemar_pvalue"] == pytest.approx(other["mcnemar_pvalue"], nan_ok=True)
    assert found["difference"] == pytest.approx(-other["difference"], nan_ok=True)
    assert found["n_items"] + found["n_dropped"] == len(outcomes)
    assert found["wins"] + found["losses"] + found["ties"] == found["n_items"]
    if found["n_items"]:
        assert found["difference"] == pytest.approx((found["wins"] - found["losses"]) / found["n_items"])
        assert found["difference"] == pytest.approx(found["accuracy"] - found["accuracy_against"])
    if not math.isnan(found["low"]):
        assert found["low"] <= found["high"]
        assert found["low"] >= -1
        assert found["high"] <= 1
    for row_ in accuracy(rows).iter_rows(named=True):
        assert row_["n_rows"] == row_["n_graded"] + row_["n_failed"] + row_["n_ungraded"]
        assert (row_["nan_reason"] is None) == (not math.isnan(row_["low"]))


def test_arms_do_not_depend_on_each_other():
    """Unadjusted numbers of an arm are the same beside others and alone."""
    parts = family(12)
    whole, alone = compared(*parts), compared(parts[0], parts[3])
    columns = [name for name in whole.columns if name not in ("adjusted_pvalue", "n_tests")]
    wanted = {"policy": "c", "against": "full"}
    assert whole.filter(**wanted).select(columns).equals(alone.filter(**wanted).select(columns))


@pytest.mark.parametrize("a_and_b", list(combinations(["forced", "free"], 2)))
def test_modes_are_apart(a_and_b):
    parts = [
        *(arm("full", "all", [1, 1, 1, 1], mode=mode) for mode in a_and_b),
        arm("h2o", "64", [1, 1, 1, 0], mode=a_and_b[0]),
        arm("h2o", "64", [0, 0, 0, 0], mode=a_and_b[1]),
    ]
    frame = compared(*parts)
    assert [one(frame, mode=mode, against="full")["difference"] for mode in a_and_b] == [-0.25, -1.0]
