"""High damage by hand: which tokens of a trace count, and what the correlations make of them."""

import math

import numpy as np
import polars as pl
import pytest
from scipy.stats import rankdata, spearmanr

from cfkv.analysis.correlate import BINARY, GRADED, correlate
from cfkv.analysis.high_damage import graded_kinds, high_damage, with_high_damage
from cfkv.config import CorrelateConfig

from .tables import ANSWER, PROMPT, planted, study

CONFIG = CorrelateConfig(draws=200, smoothings=("raw",))
NAN = math.nan


@pytest.mark.parametrize(
    ("values", "share", "labels"),
    [
        # k = 1 of 10: the largest alone.
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 0.1, [0] * 9 + [1]),
        # 14 tokens: 1.4 rounds to 1; 15 tokens: 1.5 rounds up to 2.
        (list(range(14)), 0.1, [0] * 13 + [1]),
        (list(range(15)), 0.1, [0] * 13 + [1, 1]),
        # 3 tokens: .3 rounds to 0, and one is wanted at least.
        ([1, 3, 2], 0.1, [0, 1, 0]),
        # Untested tokens are no part of n: 4 tested, share .5, k = 2.
        ([NAN, 5, NAN, 1, 2, 9, math.inf], 0.5, [-1, 1, -1, 0, 0, 1, -1]),
        # A block of three removed together ties at the threshold: k = 1 of 10, all three are in.
        ([0, 1, 2, 8, 8, 8, 3, 4, 5, 6], 0.1, [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]),
        # k = 2 of 4, the second largest is the smallest value as well: only what lies above it.
        ([0, 0, 0, 7], 0.5, [0, 0, 0, 1]),
        # k = 2 of 2 would leave no other class.
        ([4, 5], 0.9, [0, 1]),
        # Nothing to tell apart.
        ([2, 2, 2], 0.5, [-1, -1, -1]),
        ([NAN, 2], 0.5, [-1, -1]),
        ([NAN, NAN], 0.5, [-1, -1]),
        ([], 0.5, []),
    ],
)
def test_by_hand(values, share, labels):
    assert high_damage(values, share).tolist() == labels


def test_order_plays_no_part():
    values = np.random.default_rng(3).integers(0, 6, size=40).astype(float)
    shuffled = np.random.default_rng(4).permutation(40)
    np.testing.assert_array_equal(high_damage(values[shuffled], 0.2), high_damage(values, 0.2)[shuffled])


def graded_study(labels, signals, values):
    """A study whose importance is untested everywhere and whose value is as given."""
    traces, token_labels, groups = study(labels, signals, values=values, kind="eviction_kl")
    untested = pl.col("importance").list.eval(pl.lit(-1, pl.Int8))
    return traces, token_labels.with_columns(importance=untested), groups


def test_only_kinds_without_importance_are_graded():
    labels, signals = planted(4)
    _, windows, _ = study(labels, signals)
    _, graded, _ = graded_study(labels, signals, [np.arange(len(label)) for label in labels])
    _, nothing, _ = study([0 * label - 1 for label in labels], signals, kind="other")
    assert graded_kinds(pl.concat([windows, graded, nothing])) == {"eviction_kl"}
    both = with_high_damage(pl.concat([windows, graded]), study(labels, signals)[0], 0.1)
    assert both.head(4).equals(windows)
    # 60 tokens, values 0..59: the six largest are the last six.
    assert both["importance"][4].to_list() == [-1] * PROMPT + [0] * 54 + [1] * 6 + [-1] * ANSWER
    excluded = graded.with_columns(status=pl.lit("excluded"))
    assert graded_kinds(excluded) == frozenset()


def test_values_outside_the_reasoning_do_not_count():
    labels, signals = planted(4)
    traces, token_labels, _ = graded_study(labels, signals, [np.arange(len(label)) for label in labels])
    loud = token_labels.with_columns(pl.concat_list(pl.lit(1e9, pl.Float32), pl.col("value").list.slice(1)))
    decided = with_high_damage(loud, traces, 0.1)
    assert decided["importance"][0].to_list()[0] == -1
    assert sum(flag == 1 for flag in decided["importance"][0]) == 6


def test_correlations_of_a_graded_kind_by_scipy():
    """Tokens 5..8 of the third trace are untested; the last trace has one value alone and is left out."""
    labels, signals = planted(8)
    rng = np.random.default_rng(5)
    values = [rng.standard_normal(label.size).astype(np.float32) for label in labels]
    values[2][5:9] = NAN
    values[7][:] = 0.25
    frame = correlate(*graded_study(labels, signals, values), CONFIG).filter(signal="g", layer=1)
    found = {row["measure"]: row for row in frame.iter_rows(named=True)}
    assert set(found) == {*BINARY, *GRADED}
    tested = [np.isfinite(value) for value in values[:7]]
    graded = [value[keep] for value, keep in zip(values, tested, strict=False)]
    signal = [block[1].astype(np.float32)[keep] for block, keep in zip(signals["g"], tested, strict=False)]
    # 60 and 56 tokens: .1 of each rounds to 6.
    truth = [rankdata(-value) <= 6 for value in graded]
    assert [found[measure]["n_tokens"] for measure in (*BINARY, *GRADED)] == [7 * 60 - 4] * 5
    assert {found[measure]["n_traces"] for measure in found} == {7}
    assert {found[measure]["n_important"] for measure in found} == {7 * 6}
    pooled = [np.concatenate(parts) for parts in (signal, graded, truth)]
    assert found["spearman_value_pooled"]["estimate"] == pytest.approx(spearmanr(*pooled[:2]).statistic)
    assert found["spearman_pooled"]["estimate"] == pytest.approx(spearmanr(pooled[0], pooled[2]).statistic)
    z = [math.atanh(spearmanr(a, b).statistic) for a, b in zip(signal, graded, strict=True)]
    assert found["spearman_value_within"]["estimate"] == pytest.approx(math.tanh(np.mean(z)))


def test_the_share_is_the_analysts():
    labels, signals = planted(5)
    values = [np.arange(label.size) for label in labels]
    half = correlate(*graded_study(labels, signals, values), CONFIG.model_copy(update={"high_damage": 0.5}))
    assert half["n_important"].unique().to_list() == [5 * 30]


def test_a_kind_of_constant_values_has_a_reason():
    labels, signals = planted(5)
    frame = correlate(*graded_study(labels, signals, [np.ones(label.size) for label in labels]), CONFIG)
    assert set(frame["nan_reason"]) == {"value constant within every trace"}
    assert frame["n_tokens"].unique().to_list() == [0]


def test_a_window_kinds_value_is_held_against_signals_too():
    """Values 0, 1, 3, 2 against places 0..3: rank differences 0, 0, 1, 1, so rho = 1 - 6 * 2 / (4 * 15) = .8."""
    labels = [[0, 0, 1, 1]] * 5
    values = [[0.0, 1.0, 3.0, 2.0]] * 5
    frame = correlate(*study(labels, {"g": [np.zeros((1, 4))] * 5}, values=values), CONFIG)
    found = dict(frame.filter(signal="position").select("measure", "estimate").iter_rows())
    assert found["spearman_value_within"] == pytest.approx(0.8)
    assert found["spearman_value_pooled"] == pytest.approx(0.8)
    assert found["auroc"] == 1
