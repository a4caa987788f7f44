"""Bootstrap over clusters (traces, or problems with several traces), from sums per cluster.

A resample is a vector of how often each cluster was drawn. Statistics are functions of that vector and of
counts per cluster, so that no draw touches a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cfkv.analysis.intervals import Estimate

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BootstrapEstimate(Estimate):
    """`Estimate` from a bootstrap, with the draws used and those dropped as undefined."""

    n_draws: int = 0
    n_dropped: int = 0


def cluster_counts(n_clusters: int, draws: int, rng: np.random.Generator) -> Floats:
    """Draw `n_clusters` clusters with replacement, `draws` times.

    Returns
    -------
    array, shape (draws, n_clusters)
        How often each cluster was drawn; every row sums to n_clusters.
    """
    return rng.multinomial(n_clusters, np.full(n_clusters, 1 / n_clusters), size=draws).astype(np.float64)


def bootstrap_auroc(
    wins: Floats, positives: Floats, negatives: Floats, counts: Floats, level: float = 0.95
) -> BootstrapEstimate:
    """AUROC over all tokens with a percentile interval over clusters and a p-value against 0.5.

    Parameters
    ----------
    wins : array, shape (clusters, clusters)
        From `association.pairwise_wins`.
    positives, negatives : array, shape (clusters,)
        Tokens of each class per cluster.
    counts : array, shape (draws, clusters)
        From `cluster_counts`.
    level : float

    Returns
    -------
    BootstrapEstimate
        Two-sided `p = 2 min(share <= 0.5, share >= 0.5)` with 1 added to both counts, at most 1. Draws with
        one class only have no AUROC: they are dropped and counted. Below some ten clusters a percentile
        interval is too short; the counts stand beside it.

    References
    ----------
    methods.md 7; the pairwise form is exact (architecture.md 9 on why average precision has none).
    """
    n_pairs = float(positives.sum() * negatives.sum())
    drawn_pairs = (counts @ positives) * (counts @ negatives)
    drawn_wins = np.einsum("da,da->d", counts @ wins, counts)
    if n_pairs == 0:
        return _undefined("one class only", len(counts))
    return _percentile(float(wins.sum()) / n_pairs, drawn_wins, drawn_pairs, level, null=0.5)


def bootstrap_share(
    successes: Floats, totals: Floats, counts: Floats, level: float = 0.95
) -> BootstrapEstimate:
    """A pooled share `sum(successes) / sum(totals)` with a percentile interval over clusters.

    Parameters
    ----------
    successes, totals : array, shape (clusters,)
    counts : array, shape (draws, clusters)
        From `cluster_counts`.
    level : float

    Returns
    -------
    BootstrapEstimate
        The p-value is NaN: no hypothesis is tested. Undefined when all totals are 0.
    """
    if not totals.sum() > 0:
        return _undefined("no tested tokens", len(counts))
    share = float(successes.sum() / totals.sum())
    return _percentile(share, counts @ successes, counts @ totals, level, null=None)


def bootstrap_mean(
    sums: Floats,
    sizes: Floats,
    draws: int,
    rng: np.random.Generator,
    level: float = 0.95,
    null: float | None = None,
) -> BootstrapEstimate:
    """A pooled mean `sum(sums) / sum(sizes)`, such as one of paired differences, resampling clusters.

    Parameters
    ----------
    sums, sizes : array, shape (clusters,)
        Sum over the items of each cluster, of any sign, and their number.
    draws : int
    rng : Generator
    level : float
    null : float, optional
        The value of "no effect"; without it no hypothesis is tested and the p-value is NaN.

    Returns
    -------
    BootstrapEstimate
        Percentile interval. Two-sided `p = 2 min(share <= null, share >= null)` with 1 added to both counts, at
        most 1. Undefined without items.

    Notes
    -----
    Clusters with equal sum and size are interchangeable, so how often each *sort* of cluster is drawn
    (`sorts_of_clusters`) is all that a resample says. That is one multinomial draw over a handful of sorts: the same
    distribution as drawing clusters one by one, at any number of clusters, whatever their order.

    References
    ----------
    PAGE, paired differences; methods.md 7.
    """
    if not sizes.sum() > 0:
        return _undefined("no items", 0)
    values, lengths, number = sorts_of_clusters(sums, sizes)
    counts = rng.multinomial(sums.size, number / sums.size, size=draws).astype(np.float64)
    # Sums of thirds must not miss a null of 0 by 1e-17.
    numerators = np.round(counts @ values, 9)
    return _percentile(float(sums.sum() / sizes.sum()), numerators, counts @ lengths, level, null)


def sorts_of_clusters(sums: Floats, sizes: Floats) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """The different pairs (sum, size) in ascending order, and how many clusters have each; shape (sorts,)."""
    pairs: Floats = np.round(np.stack([sums, sizes], axis=1), 12).astype(np.float64)
    sorts, number = np.unique(pairs, axis=0, return_counts=True)
    return sorts[:, 0], sorts[:, 1], number.astype(np.int64)


def bootstrap_trace_mean(
    values: Floats,
    clusters: NDArray[np.integer],
    counts: Floats,
    level: float = 0.95,
    null: float | None = None,
) -> BootstrapEstimate:
    """A mean over traces with a percentile interval over clusters, from draws that many series share.

    Parameters
    ----------
    values : array, shape (traces,)
        NaN is left out.
    clusters : array, shape (traces,)
        Cluster of each trace, 0..clusters-1.
    counts : array, shape (draws, clusters)
        From `cluster_counts`.
    level : float
    null : float, optional
        As in `bootstrap_mean`.

    Returns
    -------
    BootstrapEstimate
        Undefined without a value. Draws that hit no trace with a value are dropped and counted.
    """
    known = np.isfinite(values)
    if not known.any():
        return _undefined("no value", len(counts))
    sums, totals = (
        np.bincount(clusters[known], weights=weights, minlength=counts.shape[1])
        for weights in (values[known], np.ones(int(known.sum())))
    )
    numerators = np.round(counts @ sums, 9)  # sums of thirds must not miss a null of 0 by 1e-17
    return _percentile(float(values[known].mean()), numerators, counts @ totals, level, null)


def _percentile(
    estimate: float, numerators: Floats, denominators: Floats, level: float, null: float | None
) -> BootstrapEstimate:
    kept = denominators > 0
    values = numerators[kept] / denominators[kept]
    if values.size == 0:
        return _undefined("no resample has both classes", int(kept.size))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    pvalue = math.nan
    if null is not None:
        below, above = int((values <= null).sum()), int((values >= null).sum())
        pvalue = min(1.0, 2 * (1 + min(below, above)) / (1 + values.size))
    n_dropped = int(kept.size - values.size)
    return BootstrapEstimate(estimate, float(low), float(high), pvalue, None, int(values.size), n_dropped)


def _undefined(reason: str, n_dropped: int) -> BootstrapEstimate:
    return BootstrapEstimate(math.nan, math.nan, math.nan, math.nan, reason, 0, n_dropped)
