import math

import numpy as np
import pytest

from cfkv.analysis.association import auroc, pairwise_wins, rank
from cfkv.analysis.multiplicity import benjamini_hochberg
from cfkv.analysis.resampling import bootstrap_auroc, bootstrap_share, cluster_counts


def sums(values, positive, clusters, n):
    wins = pairwise_wins(rank(values), positive, clusters, n)
    positives = np.bincount(clusters[positive], minlength=n).astype(float)
    return wins, positives, np.bincount(clusters[~positive], minlength=n).astype(float)


def test_bootstrap_equals_naive_resampling_with_the_same_counts():
    rng = np.random.default_rng(0)
    n = 7
    clusters = rng.integers(0, n, 150)
    positive = rng.random(150) < 0.3
    values = np.round(rng.standard_normal(150) + positive, 1)
    counts = cluster_counts(n, 200, rng)
    naive = []
    for row in counts.astype(int):
        chosen = np.concatenate(
            [np.flatnonzero(clusters == c) for c in np.repeat(np.arange(n), row)] or [np.zeros(0, int)]
        )
        naive.append(auroc(values[chosen], positive[chosen]))
    result = bootstrap_auroc(*sums(values, positive, clusters, n), counts)
    assert result.estimate == pytest.approx(auroc(values, positive))
    assert (result.low, result.high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])))
    below = sum(value <= 0.5 for value in naive)
    assert result.pvalue == pytest.approx(2 * (1 + min(below, 200 - below)) / 201)


def test_smallest_p_value_is_that_of_page():
    # methods.md 7: 10,000 draws with +1 smoothing bottom out at 2/10001 = 2.0e-4
    values, positive = np.tile([0.0, 1.0], 5), np.tile([False, True], 5)
    counts = cluster_counts(5, 10_000, np.random.default_rng(0))
    result = bootstrap_auroc(*sums(values, positive, np.repeat(np.arange(5), 2), 5), counts)
    assert (result.estimate, result.low, result.high) == (1, 1, 1)
    assert result.pvalue == pytest.approx(2 / 10_001)


def test_no_association_has_p_one():
    counts = cluster_counts(4, 100, np.random.default_rng(0))
    values, positive = np.zeros(8), np.tile([True, False], 4)
    result = bootstrap_auroc(*sums(values, positive, np.repeat(np.arange(4), 2), 4), counts)
    assert (result.estimate, result.pvalue) == (0.5, 1.0)


def test_one_class_draws_are_dropped_and_counted():
    # All positives are in cluster 0: draws without it, (2/3)^3 = 30 % of them, have no AUROC.
    values, positive = np.arange(6.0), np.array([True, False, False, False, False, False])
    counts = cluster_counts(3, 1000, np.random.default_rng(0))
    result = bootstrap_auroc(*sums(values, positive, np.repeat(np.arange(3), 2), 3), counts)
    missing = int((counts[:, 0] == 0).sum())
    assert (result.n_dropped, result.n_draws) == (missing, 1000 - missing)
    assert 250 < missing < 350
    assert result.estimate == 0.0
    one_class = bootstrap_auroc(*sums(values, positive & False, np.repeat(np.arange(3), 2), 3), counts)
    assert one_class.reason == "one class only"
    assert math.isnan(one_class.estimate)


def test_counts_are_multinomial_and_seeded():
    counts = cluster_counts(9, 500, np.random.default_rng(3))
    assert (counts.sum(axis=1) == 9).all()
    np.testing.assert_array_equal(counts, cluster_counts(9, 500, np.random.default_rng(3)))
    assert counts.mean(axis=0) == pytest.approx(np.ones(9), abs=0.2)


def test_share_is_pooled_and_equal_clusters_have_no_spread():
    counts = cluster_counts(6, 300, np.random.default_rng(0))
    result = bootstrap_share(np.full(6, 2.0), np.full(6, 10.0), counts)
    assert (result.estimate, result.low, result.high) == pytest.approx((0.2, 0.2, 0.2))
    # pooled: (1 + 9) / (10 + 30), not the mean of .1 and .3
    assert bootstrap_share(np.array([1.0, 9]), np.array([10.0, 30]), counts[:, :2]).estimate == 0.25
    assert bootstrap_share(np.zeros(6), np.zeros(6), counts).reason == "no tested tokens"


def test_benjamini_hochberg_by_hand():
    # sorted .01 .02 .03 .5 with m = 4: .04, .04, .04, .5 (p*m/rank, then the running minimum from above)
    np.testing.assert_allclose(benjamini_hochberg([0.02, 0.5, 0.01, 0.03]), [0.04, 0.5, 0.04, 0.04])
    # A test that was not made does not count: m = 2, .01*2/1 and .04*2/2
    np.testing.assert_allclose(benjamini_hochberg([0.01, np.nan, 0.04]), [0.02, np.nan, 0.04])
    assert benjamini_hochberg([]).size == 0
    assert np.isnan(benjamini_hochberg([np.nan])).all()


def test_benjamini_hochberg_thresholds_of_page():
    # closed_forms.md B24: 16 cells at p <= 5e-4 all survive q = .05
    assert (benjamini_hochberg(np.full(16, 5e-4)) <= 0.05).all()
