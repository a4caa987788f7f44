"""Validity measures: values by hand, ties against every order of them, degenerate input, sums over traces."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from statsmodels.stats.multitest import multipletests

from cfkv.analysis import validity as v
from cfkv.analysis.multiplicity import adjust
from cfkv.analysis.resampling import bootstrap_trace_mean, cluster_counts
from cfkv.analysis.validity_summary import summarise, validity_tables, verdict
from cfkv.config import OfflineConfig
from cfkv.schemas import VALIDITY_SUMMARY

CONFIG = OfflineConfig(draws=400)


def truth(important: Any, label: Any = None, values: Any = None) -> v.Truth:
    positive = np.array(important, dtype=bool)
    known = positive.astype(float) if label is None else np.array(label, dtype=float)
    return v.Truth(positive, known, known if values is None else np.array(values, dtype=float))


def found(scores: Any, about: v.Truth, shares: tuple[float, ...] = (0.5,)) -> dict[str, float]:
    table = np.atleast_2d(np.array(scores, dtype=np.float32))
    return {each.measure: each.value for each in v.judge(table, about, shares)}


def test_mean_percentile_by_hand() -> None:
    """Ranks 0, 1.5, 1.5, 3 of 3 and 3, 2, 1, 0 of 3, averaged over both tables."""
    number = v.mean_percentile(np.array([[0.0, 5, 5, 9], [4, 3, 2, 1]]))
    np.testing.assert_allclose(number, [0.5, 3.5 / 6, 2.5 / 6, 0.5])
    assert v.mean_percentile(np.array([[3.0], [7.0]])) == [0.5]


def test_equal_ranks_stay_equal_over_many_tables() -> None:
    """Two tokens that swap ranks in pairs of tables tie exactly, not but for rounding."""
    scores = np.array([[1, 2, 3], [2, 1, 3], [1, 2, 3], [2, 1, 3], [3, 3, 1]] * 7)
    number = v.mean_percentile(scores)
    assert number[0] == number[1]


def test_measures_by_hand() -> None:
    """Order of places: important, not, important, not. Discounts 1, 1/log2(3), 1/2, 1/log2(5)."""
    got = found([4, 3, 2, 1], truth([1, 0, 1, 0]))
    assert got["auroc"] == 0.75
    assert got["average_precision"] == pytest.approx((1 + 2 / 3) / 2)
    assert got["ndcg"] == pytest.approx((1 + 0.5) / (1 + 1 / math.log2(3)))
    assert got["rho"] == pytest.approx(spearmanr([4, 3, 2, 1], [1, 0, 1, 0])[0])
    # Two of four are kept: tokens 0 and 1. The oracle keeps 0 and 2.
    assert (got["recall"], got["overlap"], got["regret"]) == (0.5, 1 / 3, 0.5)


def test_graded_label_by_hand() -> None:
    """Label mass is clipped at 0: 3, 0, 1, 0. Kept: tokens 2 and 3 (mass 1); the oracle keeps mass 4."""
    about = truth([1, 0, 0, 0], [3, -2, 1, 0])
    got = found([1, 2, 3, 4], about)
    assert got["regret"] == 0.75
    assert got["rho_value"] == pytest.approx(spearmanr([1, 2, 3, 4], [3, -2, 1, 0])[0])
    assert got["ndcg"] == pytest.approx((1 / math.log2(3) + 3 / math.log2(5)) / (3 + 1 / math.log2(3)))


def test_kept_by_shares_of_tables() -> None:
    """Two tables with another favourite each: half of either token; overlap with (1, 0, 0) is .5 / 1.5."""
    scores = np.array([[3.0, 1, 2], [1, 3, 2]])
    np.testing.assert_array_equal(v.keep_shares(scores, 1), [0.5, 0.5, 0])
    assert v.overlap(v.keep_shares(scores, 1), np.array([1.0, 0, 0])) == pytest.approx(1 / 3)


def test_ties_keep_the_later_position() -> None:
    np.testing.assert_array_equal(v.keep_shares(np.zeros((1, 4)), 2), [0, 0, 1, 1])
    np.testing.assert_array_equal(v.keep_shares(np.array([[1.0, 0, 1, 1]]), 2), [0, 0, 1, 1])


def test_kept_count() -> None:
    """Rounded down, not moved by binary fractions, at least one."""
    assert [v.kept_count(s, n) for s, n in ((0.25, 10), (0.29, 100), (0.1, 3), (0.5, 7))] == [2, 29, 1, 3]


ties = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(ties)
def test_ties_are_the_mean_over_all_orders(tokens: list[tuple[int, bool]]) -> None:
    """Average precision and NDCG against their plain formulas over every order of the tokens."""
    number, important = np.array([t[0] for t in tokens], dtype=float), np.array([t[1] for t in tokens])
    if not important.any():
        assert math.isnan(v.average_precision(number, important)[0])
        return
    precisions, gains = [], []
    for order in itertools.permutations(range(len(tokens))):
        if all(number[a] >= number[b] for a, b in itertools.pairwise(order)):
            hits = important[list(order)]
            places = np.arange(1, len(tokens) + 1)
            precisions.append((np.cumsum(hits) / places)[hits].mean())
            gains.append((hits / np.log2(places + 1)).sum())
    best = sum(1 / math.log2(place + 2) for place in range(int(important.sum())))
    assert v.average_precision(number, important)[0] == pytest.approx(np.mean(precisions))
    assert v.ndcg(number, important.astype(float))[0] == pytest.approx(np.mean(gains) / best)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_oracle_and_its_opposite(seed: int) -> None:
    """1 and 0 in AUROC, no regret and all of it where the other half is empty of mass."""
    rng = np.random.default_rng(seed)
    label = np.concatenate([np.zeros(8), rng.uniform(0.1, 1, size=4)])[rng.permutation(12)]
    about = truth(label > 0, label)
    best, worst = found(label, about), found(-label, about)
    assert (best["auroc"], best["average_precision"], best["regret"], best["overlap"]) == (1, 1, 0, 1)
    assert best["ndcg"] == pytest.approx(1)
    assert best["recall"] == 1
    assert (worst["auroc"], worst["recall"], worst["regret"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("scores", "about", "reasons"),
    [
        ([[]], truth([]), dict.fromkeys((*v.SCORE_MEASURES, *v.KEEP_MEASURES), "no tested token")),
        (
            [[1, 2]],
            truth([0, 0], values=[np.nan, np.nan]),
            {
                **dict.fromkeys(("rho", "auroc", "average_precision", "recall"), "no important token"),
                **{"rho_value": "no graded value", "ndcg": "no label mass", "regret": "no label mass"},
            },
        ),
        (
            [[1, 2]],
            truth([1, 1], values=[3, 3]),
            {"rho": "one class only", "auroc": "one class only", "rho_value": "constant value"},
        ),
        ([[5, 5, 5]], truth([1, 0, 0]), {"rho": "constant score", "rho_value": "constant score"}),
        (
            [[5]],
            truth([1]),
            {"rho": "one class only", "auroc": "one class only", "rho_value": "constant value"},
        ),
    ],
)
def test_what_has_no_value_says_why(scores: Any, about: v.Truth, reasons: dict[str, str]) -> None:
    measured = v.judge(np.array(scores, dtype=np.float32), about, (0.5,))
    assert len(measured) == 8
    assert {each.measure: each.reason for each in measured if each.reason} == reasons
    assert all(math.isnan(each.value) == (each.reason is not None) for each in measured)


def test_a_constant_score_is_chance() -> None:
    got = found([7, 7, 7, 7], truth([1, 0, 1, 0]))
    assert (got["auroc"], got["recall"]) == (0.5, 0.5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_adjusted_as_statsmodels_does(pvalues: list[float]) -> None:
    assert np.array_equal(adjust(pvalues, "holm"), multipletests(pvalues, method="holm")[1])
    assert np.array_equal(adjust(pvalues, "benjamini_hochberg"), multipletests(pvalues, method="fdr_bh")[1])


def test_adjusting_leaves_out_what_was_not_tested() -> None:
    """Three tests: .01 * 3, .03 * 2, then .04 raised to what stands before it."""
    np.testing.assert_allclose(adjust([0.01, math.nan, 0.04, 0.03], "holm"), [0.03, math.nan, 0.06, 0.06])
    assert adjust([], "holm").size == 0


def test_bootstrap_mean_by_hand() -> None:
    """Cluster sums 3 of 2 traces, and 5 of 1; a NaN trace plays no part, and a draw of cluster 2 alone is dropped."""
    values, clusters = np.array([1.0, 2, 5, np.nan]), np.array([0, 0, 1, 2])
    counts = np.array([[3.0, 0, 0], [0, 3, 0], [1, 1, 1], [0, 0, 3]])
    got = bootstrap_trace_mean(values, clusters, counts, level=0.5, null=0.0)
    assert got.estimate == pytest.approx(8 / 3)
    assert (got.n_draws, got.n_dropped) == (3, 1)
    assert (got.low, got.high) == (pytest.approx((1.5 + 8 / 3) / 2), pytest.approx((8 / 3 + 5) / 2))
    assert got.pvalue == pytest.approx(2 / 4)
    assert math.isnan(bootstrap_trace_mean(np.array([np.nan]), np.array([0]), counts).estimate)


def frame(values: dict[str, list[float]], problems: list[str] | None = None, **columns: Any) -> pl.DataFrame:
    """policy_validity of one measure: values per policy, one per trace."""
    base = {"kind": "k", "checkpoint": "end", "measure": "auroc", "share": None, **columns}
    rows = [
        {
            **base,
            "policy": policy,
            "trace_id": f"t{i}",
            "problem_id": (problems or [f"p{j}" for j in range(len(own))])[i],
            "step": 9,
            "value": value,
            "n_candidates": 10,
            "n_important": 2,
            "nan_reason": "one class only" if math.isnan(value) else None,
        }
        for policy, own in values.items()
        for i, value in enumerate(own)
    ]
    return pl.DataFrame(rows, schema_overrides={"share": pl.Float64, "nan_reason": pl.String})


def row(summary: pl.DataFrame, policy: str, versus: str | None = None) -> dict[str, Any]:
    (one,) = summary.filter(pl.col("policy") == policy, pl.col("versus").eq_missing(versus)).to_dicts()
    return one


def test_summary_by_hand() -> None:
    """Means over the traces with a value; differences over the pairs; NaN counted, not averaged."""
    nan = math.nan
    values = {
        "random": [0.5, 0.5, 0.4, 0.6, 0.5, nan],
        "position": [0.4, 0.6, 0.5, 0.5, 0.5, 0.5],
        "h2o": [0.9, 0.8, 0.9, 0.9, nan, 0.7],
    }
    summary = summarise(frame(values), CONFIG)
    own, less = row(summary, "h2o"), row(summary, "h2o", "random")
    assert own["estimate"] == pytest.approx(0.84)
    assert (own["n_traces"], own["n_dropped"], own["n_candidates"], own["n_important"]) == (5, 1, 50, 10)
    assert own["low"] < 0.84 < own["high"]
    assert less["estimate"] == pytest.approx((0.4 + 0.3 + 0.5 + 0.3) / 4)
    assert (less["n_traces"], less["n_dropped"], less["n_policies"]) == (4, 2, 2)
    assert less["pvalue"] == pytest.approx(2 / 401)
    assert less["adjusted_pvalue"] == pytest.approx(4 / 401)
    assert math.isnan(own["pvalue"])
    assert row(summary, "position", "random")["estimate"] == pytest.approx((-0.1 + 0.1 + 0.1 - 0.1 + 0) / 5)
    with pytest.raises(ValueError, match="unpack"):
        row(summary, "random", "random")


def test_rho_is_averaged_as_fisher_z() -> None:
    values = [0.2, 0.4, 0.6, 0.1]
    own = row(summarise(frame({"random": values}, measure="rho"), CONFIG), "random")
    assert own["estimate"] == pytest.approx(math.tanh(np.arctanh(values).mean()))


def test_several_traces_of_a_problem_are_one_unit() -> None:
    """Four problems with five equal traces each are as sure as four traces."""
    values = [0.5, 0.6, 0.7, 0.9]
    alone = row(summarise(frame({"random": values}), CONFIG), "random")
    five = frame({"random": values * 5}, [f"p{i % 4}" for i in range(20)])
    many = row(summarise(five, CONFIG), "random")
    assert (many["n_traces"], many["n_problems"]) == (20, 4)
    assert (many["low"], many["high"]) == (pytest.approx(alone["low"]), pytest.approx(alone["high"]))


def test_few_problems_have_an_estimate_and_no_interval() -> None:
    summary = summarise(frame({"random": [0.5, 0.5, 0.5], "h2o": [0.9, 0.9, 0.9]}), CONFIG)
    less = row(summary, "h2o", "random")
    assert (less["estimate"], less["nan_reason"]) == (pytest.approx(0.4), "n_traces < 4")
    assert math.isnan(less["low"])
    assert math.isnan(less["adjusted_pvalue"])
    assert (
        row(summarise(frame({"random": [math.nan] * 5}), CONFIG), "random")["nan_reason"] == "one class only"
    )


def test_nothing_labelled_gives_no_rows() -> None:
    summary = summarise(frame({"random": [0.5]}).clear(), CONFIG)
    assert summary.is_empty()
    assert summary.columns == list(VALIDITY_SUMMARY.schema.names)
    assert validity_tables(summary, CONFIG) == []


def test_the_order_of_rows_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    whole = frame({name: rng.uniform(size=6).tolist() for name in ("random", "position", "h2o", "tova")})
    assert summarise(whole, CONFIG).equals(summarise(whole.sample(fraction=1, shuffle=True, seed=3), CONFIG))


def test_draws_are_reproducible() -> None:
    first, second = (cluster_counts(5, 10, np.random.default_rng([0, 1])) for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("estimate", "pvalue", "told"),
    [
        (0.12, 0.0123, "+.12, p = .012"),
        (-0.12, 0.0004, "-.12, p < .001, worse"),
        (0.12, 0.05, "+.12, not different"),
        (0.12, math.nan, "+.12, n_traces < 4"),
        (math.nan, math.nan, "none: n_traces < 4"),
    ],
)
def test_verdicts(estimate: float, pvalue: float, told: str) -> None:
    shown = {"estimate": estimate, "adjusted_pvalue": pvalue, "nan_reason": "n_traces < 4"}
    assert verdict(shown) == told


def test_the_table_fits_a_hundred_columns() -> None:
    """Long names fold; the best AUROC comes first; a lack of significance is said."""
    from rich.console import Console

    name = "ada_kv:base=snapkv_decode;options={kernel: 3}"
    rng = np.random.default_rng(0)
    values = {"random": 0.5, "position": 0.52, name: 0.9, "oracle": 1.0}
    spread = {policy: [mean + 0.1 * rng.normal() for _ in range(6)] for policy, mean in values.items()}
    whole = pl.concat(
        [
            frame(spread, measure=measure, share=share)
            for measure, share in (
                *((m, None) for m in v.SCORE_MEASURES),
                *((m, s) for m in v.KEEP_MEASURES for s in (0.125, 0.25)),
            )
        ]
    )
    (table,) = validity_tables(summarise(whole, CONFIG), CONFIG)
    console = Console(width=100, record=True)
    console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "not different" in text
    assert text.index("oracle") < text.index("ada_kv") < text.index("position")
    assert "p adjusted over 3 policies (Holm)" in " ".join(text.split())
    few = OfflineConfig(draws=100)
    (table,) = validity_tables(summarise(whole, few), few)
    assert "With 100 draws no adjusted p is below 0.06: raise --draws." in str(table.caption)
