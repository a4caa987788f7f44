import math

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from scipy.stats import mannwhitneyu, spearmanr

from cfkv.analysis.correlate import BINARY, GRADED, MEASURES, correlate
from cfkv.analysis.multiplicity import benjamini_hochberg
from cfkv.analysis.smoothing import smooth
from cfkv.config import CorrelateConfig
from cfkv.errors import CfkvError
from cfkv.schemas import CORRELATIONS

from .tables import planted, study

CONFIG = CorrelateConfig(draws=200, rolling_window=8)


def row(frame, measure, **where):
    found = frame.filter(measure=measure, **where)
    assert found.height == 1, found
    return found.row(0, named=True)


def test_columns_types_and_key_are_those_of_the_schema():
    labels, signals = planted(6)
    frame = correlate(*study(labels, signals), CONFIG)
    arrow = frame.to_arrow()
    assert arrow.schema.names == CORRELATIONS.schema.names
    assert (
        arrow.cast(CORRELATIONS.schema).num_rows == 2 * 4 * 5 + 5
    )  # layers x smoothings x measures, and position
    assert frame.select(CORRELATIONS.key).is_unique().all()
    assert frame["level"].unique().to_list() == [0.95]


def test_planted_signal_is_found_and_noise_is_not():
    labels, signals = planted()
    frame = correlate(*study(labels, signals), CONFIG)
    for measure in (*BINARY[1:], GRADED[1]):
        found = row(frame, measure, layer=1, smoothing="raw")
        assert found["adjusted_pvalue"] < 0.05
        assert found["low"] > (0.5 if measure == "auroc" else 0)
        noise = row(frame, measure, layer=0, smoothing="raw")
        assert noise["adjusted_pvalue"] > 0.05
        assert noise["low"] < (0.5 if measure == "auroc" else 0) < noise["high"]
    assert frame["nan_reason"].is_null().all()


@pytest.mark.parametrize("smoothing", CONFIG.smoothings)
def test_estimates_match_scipy_on_tokens_gathered_by_hand(smoothing):
    labels, signals = planted(8)
    labels[2][5:9] = -1  # untested tokens still feed the smoothing
    frame = correlate(*study(labels, signals), CONFIG)
    smoothed = [
        smooth(block.astype(np.float32), smoothing, alpha=0.9, window=8)[1].astype(np.float32)
        for block in signals["g"]
    ]
    tested = [label >= 0 for label in labels]
    values = [value[keep] for value, keep in zip(smoothed, tested, strict=True)]
    truths = [label[keep] for label, keep in zip(labels, tested, strict=True)]
    pooled, truth = np.concatenate(values), np.concatenate(truths)
    found = {measure: row(frame, measure, layer=1, smoothing=smoothing) for measure in MEASURES}
    assert found["spearman_pooled"]["estimate"] == pytest.approx(spearmanr(pooled, truth).statistic)
    z = [math.atanh(spearmanr(*pair).statistic) for pair in zip(values, truths, strict=True)]
    assert found["spearman_within"]["estimate"] == pytest.approx(math.tanh(np.mean(z)))
    wins = mannwhitneyu(pooled[truth == 1], pooled[truth == 0]).statistic
    assert found["auroc"]["estimate"] == pytest.approx(wins / (truth.sum() * (1 - truth).sum()))
    assert found["auroc"]["n_tokens"] == truth.size == 8 * 60 - 4
    assert found["auroc"]["n_important"] == truth.sum()


def test_pooled_interval_uses_traces_not_tokens():
    labels, signals = planted(12)
    found = row(correlate(*study(labels, signals), CONFIG), "spearman_pooled", layer=1, smoothing="raw")
    half = 1.959964 / math.sqrt(12 - 3)
    assert math.atanh(found["high"]) - math.atanh(found["estimate"]) == pytest.approx(half, rel=1e-5)


def test_the_order_of_rows_and_other_groups_change_nothing():
    labels, signals = planted(7)
    traces, token_labels, groups = study(labels, signals)
    expected = correlate(traces, token_labels, groups, CONFIG)
    shuffled = correlate(
        traces.sample(fraction=1, shuffle=True, seed=1),
        token_labels.sample(fraction=1, shuffle=True, seed=2),
        {"group": groups["group"].sample(fraction=1, shuffle=True, seed=3)},
        CONFIG,
    )
    assert_frame_equal(shuffled, expected, check_exact=True)
    other = groups["group"].rename({"g": "h"})
    both = correlate(traces, token_labels, {**groups, "other": other}, CONFIG)
    columns = pl.exclude("adjusted_pvalue")
    assert_frame_equal(
        both.filter(signal="g").select(columns), expected.filter(signal="g").select(columns), check_exact=True
    )


def test_p_values_are_adjusted_within_kind_and_measure():
    labels, signals = planted(6)
    traces, token_labels, groups = study(labels, signals)
    both = pl.concat([token_labels, token_labels.with_columns(kind=pl.lit("knockout"))])
    frame = correlate(traces, both, groups, CONFIG)
    assert frame["kind"].unique().sort().to_list() == ["knockout", "occlusion"]
    for _, family in frame.group_by("kind", "measure"):
        assert family.height == 8 + 1  # and position
        expected = benjamini_hochberg(family["pvalue"].to_numpy())
        np.testing.assert_allclose(family["adjusted_pvalue"], expected)


def test_missing_traces_missing_values_and_unlabelled_traces_reduce_the_counts():
    labels, signals = planted(8)
    for block in signals["g"]:
        block[:, 0] = np.nan
    traces, token_labels, groups = study(labels, signals)
    token_labels = token_labels.with_columns(
        status=pl.when(trace_id="t001").then(pl.lit("excluded")).otherwise("status")
    )
    groups["group"] = groups["group"].filter(pl.col("trace_id") != "t002")
    heads = groups["group"].with_columns(kv_head=pl.lit(0, pl.Int16))
    groups["group"] = pl.concat([groups["group"], heads])
    found = row(correlate(traces, token_labels, groups, CONFIG), "auroc", layer=1, smoothing="rolling_z")
    assert (found["n_traces"], found["n_tokens"]) == (6, 6 * 59)


def test_a_layer_that_one_trace_lacks_is_absent_there_only():
    labels, signals = planted(6)
    traces, token_labels, groups = study(labels, signals)
    groups["group"] = groups["group"].filter(~((pl.col("trace_id") == "t000") & (pl.col("layer") == 1)))
    frame = correlate(traces, token_labels, groups, CONFIG)
    assert row(frame, "auroc", layer=0, smoothing="raw")["n_traces"] == 6
    assert row(frame, "auroc", layer=1, smoothing="raw")["n_traces"] == 5


def test_traces_of_one_problem_are_one_unit():
    labels, signals = planted(5)
    doubled = {"g": [block for block in signals["g"] for _ in range(2)]}
    problems = [f"p{index}" for index in range(5) for _ in range(2)]
    once = correlate(*study(labels, signals), CONFIG)
    twice = correlate(*study([label for label in labels for _ in range(2)], doubled, problems), CONFIG)
    same = ["estimate", "low", "high", "pvalue"]
    assert_frame_equal(twice.select(same), once.select(same))
    assert twice["n_traces"].unique().to_list() == [10]


def degenerate(frame, measure="spearman_pooled", smoothing="raw"):
    found = row(frame, measure, layer=0, smoothing=smoothing)
    assert all(math.isnan(found[name]) for name in ("estimate", "low", "high", "pvalue", "adjusted_pvalue"))
    return found["nan_reason"]


def test_degenerate_input_is_nan_with_a_reason():
    labels, signals = planted(6)
    constant = correlate(*study(labels, {"g": [0 * block + 0.1 for block in signals["g"]]}), CONFIG)
    for smoothing in CONFIG.smoothings:
        for measure in MEASURES:
            assert degenerate(constant, measure, smoothing) == "constant signal"
    zeros = correlate(*study([0 * label for label in labels], signals), CONFIG)
    assert {degenerate(zeros, measure) for measure in BINARY} == {"one class only"}
    assert {degenerate(zeros, measure) for measure in GRADED} == {"constant value"}
    unvalued = study(labels, signals, values=[np.full(len(label), np.nan) for label in labels])
    assert {degenerate(correlate(*unvalued, CONFIG), measure) for measure in GRADED} == {"no values"}
    untested = correlate(*study([0 * label - 1 for label in labels], signals), CONFIG)
    assert degenerate(untested) == "no tested tokens"
    three = correlate(*study(labels[:3], {"g": signals["g"][:3]}), CONFIG)
    assert degenerate(three) == degenerate(three, "auroc") == "n_traces < 4"
    assert row(three, "spearman_within", layer=0, smoothing="raw")["nan_reason"] is None
    two_problems = correlate(*study(labels, signals, ["p", "p", "p", "q", "q", "q"]), CONFIG)
    assert degenerate(two_problems) == "n_problems < 4"
    # Labels vary between traces only.
    between = correlate(*study([0 * label + i % 2 for i, label in enumerate(labels)], signals), CONFIG)
    assert degenerate(between, "spearman_within") == "fewer than 2 usable traces"
    assert row(between, "spearman_pooled", layer=0, smoothing="raw")["nan_reason"] is None


def test_nothing_labelled_and_no_signals():
    labels, signals = planted(4)
    traces, token_labels, groups = study(labels, signals)
    excluded = token_labels.with_columns(status=pl.lit("excluded"))
    frame = correlate(traces, excluded, groups, CONFIG)
    assert frame.height == 2 * 4 * 5 + 5
    assert set(frame["nan_reason"]) == {"no tested tokens"}
    bare = correlate(traces, token_labels, {}, CONFIG)
    assert bare.columns == CORRELATIONS.schema.names
    assert bare["signal"].unique().to_list() == ["position"]


def test_position_is_the_baseline_of_every_study():
    # Tested tokens at places 0..3 of each trace; the last two are important. Ranks 1..4 against ties 1.5, 1.5,
    # 3.5, 3.5: rho = 4 / sqrt(5 * 4) = 0.894; every important token lies after every other: AUROC 1.
    labels = [[0, 0, 1, 1]] * 5
    frame = correlate(*study(labels, {"g": [np.zeros((1, 4))] * 5}), CONFIG).filter(signal="position")
    assert frame["layer"].null_count() == frame.height == 5
    assert frame["smoothing"].unique().to_list() == ["raw"]
    found = dict(frame.select("measure", "estimate").iter_rows())
    assert found["auroc"] == 1
    assert found["spearman_within"] == pytest.approx(0.8944, abs=1e-4)
    assert found["spearman_pooled"] == pytest.approx(0.8944, abs=1e-4)


def test_signal_without_layers():
    labels, signals = planted(5)
    traces, token_labels, groups = study(labels, signals)
    flat = groups["group"].filter(layer=1).with_columns(layer=pl.lit(None, pl.Int16))
    frame = correlate(traces, token_labels, {"logits": flat}, CONFIG)
    assert frame["layer"].null_count() == frame.height == 20 + 5


def test_lists_that_do_not_cover_the_tokens_are_refused():
    labels, signals = planted(5)
    traces, token_labels, groups = study(labels, signals)
    short = groups["group"].with_columns(pl.col("g").list.head(10))
    with pytest.raises(CfkvError, match="signal 'g' of trace 't000' has 10 values for 65 token_ids"):
        correlate(traces, token_labels, {"group": short}, CONFIG)
    with pytest.raises(CfkvError, match="importance of kind 'occlusion' of trace 't000' has 10 values"):
        correlate(traces, token_labels.with_columns(pl.col("importance").list.head(10)), groups, CONFIG)
    with pytest.raises(CfkvError, match="'t004', which traces lacks"):
        correlate(traces.head(4), token_labels, groups, CONFIG)
    with pytest.raises(CfkvError, match="both groups 'group' and 'twin'"):
        correlate(traces, token_labels, {**groups, "twin": groups["group"]}, CONFIG)
