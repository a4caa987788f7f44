import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from cfkv.analysis import association
from cfkv.analysis.association import auroc, pairwise_wins, rank, spearman, spearman_within


def brute_wins(values, positive, clusters, n):
    wins = np.zeros((n, n))
    for i in np.flatnonzero(positive):
        for j in np.flatnonzero(~positive):
            win = 1.0 if values[i] > values[j] else 0.5 if values[i] == values[j] else 0.0
            wins[clusters[i], clusters[j]] += win
    return wins


# Few distinct values, so that ties are the rule.
cases = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.booleans(), st.integers(0, 3)),
    min_size=2,
    max_size=40,
).map(lambda rows: tuple(np.array(column) for column in zip(*rows, strict=True)))


def test_spearman_by_hand():
    # ranks of [3,1,2,2] are 4,1,2.5,2.5; label 1,0,0,1. Centred ranks 1.5,-1.5,0,0: shared = 1.5;
    # sum of squares 4.5; label variance sum 4*.25 = 1: rho = 1.5/sqrt(4.5) = .7071
    rho = spearman(rank([3.0, 1, 2, 2]), np.array([True, False, False, True]))
    assert rho == pytest.approx(math.sqrt(0.5))


def test_auroc_by_hand():
    # positives 2, 1 against negatives 1, 0: 2>1, 2>0, 1=1 (half), 1>0 -> 3.5/4
    assert auroc([2, 1, 1, 0], [1, 1, 0, 0]) == pytest.approx(3.5 / 4)
    assert auroc([5, 5, 5], [1, 0, 0]) == 0.5


@settings(max_examples=80, deadline=None)
@given(cases)
def test_measures_against_scipy_and_brute_force(case):
    values, positive, traces = case
    ranking = rank(values)
    wins = pairwise_wins(ranking, positive, traces, 4)
    np.testing.assert_array_equal(wins, brute_wins(values, positive, traces, 4))
    mixed = 0 < positive.sum() < positive.size
    if mixed:
        n_pairs = positive.sum() * (~positive).sum()
        assert auroc(values, positive) == pytest.approx(wins.sum() / n_pairs)
    if mixed and np.ptp(values) > 0:
        assert spearman(ranking, positive) == pytest.approx(spearmanr(values, positive).statistic)
    else:
        assert math.isnan(spearman(ranking, positive))
    within = spearman_within(ranking, positive, traces, 4)
    for trace in range(4):
        here = traces == trace
        if here.any() and np.ptp(values[here]) > 0 and 0 < positive[here].sum() < here.sum():
            expected = spearmanr(values[here], positive[here]).statistic
            assert within[trace] == pytest.approx(expected)
        else:
            assert math.isnan(within[trace])


@pytest.mark.parametrize("cells", [1, 8, 64])
def test_pairwise_wins_do_not_depend_on_the_block_size(monkeypatch, cells):
    rng = np.random.default_rng(0)
    values, positive = rng.integers(0, 9, 200).astype(float), rng.random(200) < 0.3
    clusters = rng.integers(0, 4, 200)
    monkeypatch.setattr(association, "BLOCK_CELLS", cells)
    wins = pairwise_wins(rank(values), positive, clusters, 4)
    np.testing.assert_array_equal(wins, brute_wins(values, positive, clusters, 4))


def test_within_traces_ignores_differences_between_traces():
    # Trace 1 lies 100 higher and has more positives: pooled rho is positive, within it is -1 or 0.
    values = np.array([0.0, 1, 2, 100, 101, 102])
    positive = np.array([True, False, False, True, True, False])
    traces = np.array([0, 0, 0, 1, 1, 1])
    ranking = rank(values)
    within = spearman_within(ranking, positive, traces, 2)
    # centred ranks -1,0,1; one positive at -1: -1/sqrt(2*1*2/3) = -.866, and for {-1,0}: the same
    np.testing.assert_allclose(within, [-math.sqrt(0.75)] * 2)
    assert spearman(ranking, positive) > spearman(rank(values % 100), positive)


def test_many_traces_do_not_overflow_the_trace_code():
    n = 40_000
    traces = np.repeat(np.arange(n), 2)
    values = np.tile([0.0, 1.0], n)
    within = spearman_within(rank(values), values == 1, traces, n)
    np.testing.assert_array_equal(within, 1.0)


def test_degenerate_input():
    assert math.isnan(auroc([1.0, 2.0], [1, 1]))
    assert math.isnan(spearman(rank([]), np.zeros(0, dtype=bool)))
    assert np.isnan(spearman_within(rank([]), np.zeros(0, dtype=bool), np.zeros(0, dtype=int), 2)).all()
    with pytest.raises(ValueError, match="not finite"):
        rank([1.0, np.nan])
