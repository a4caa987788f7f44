"""Rank agreement between a signal and a label: Spearman pooled and within traces, AUROC.

The signal is sorted once (`rank`); every measure reads that ranking. Against a 0/1 label Spearman's rho is
the Pearson correlation of average ranks with the label itself, because the average ranks of two values are
an affine function of them. Against a graded value it is that of two sets of average ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Cells of the positives x clusters table that are held at once (8 bytes each).
BLOCK_CELLS = 1 << 20


@dataclass(frozen=True)
class Ranking:
    """Values in ascending order; index i of each array speaks of the i-th smallest value.

    Attributes
    ----------
    order : array, shape (tokens,)
        Where the i-th smallest value stood.
    first, stop : array, shape (tokens,)
        The half-open range of sorted places that hold the same value.
    values : array, shape (tokens,)
        The values, unsorted.
    """

    order: Ints
    first: Ints
    stop: Ints
    values: NDArray[np.floating]

    @property
    def constant(self) -> bool:
        """True for fewer than two different values."""
        return self.order.size == 0 or bool(self.first[-1] == 0)


def rank(values: ArrayLike) -> Ranking:
    """Sort a signal once, with its ties.

    Parameters
    ----------
    values : array, shape (tokens,)
        Finite. The dtype decides what is a tie, so pass float32 for values stored as such.

    Raises
    ------
    ValueError
        For a value that is not finite: drop those first.
    """
    array = np.asarray(values)
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError("a value to rank is not finite; drop missing values first")
    order = np.argsort(array)
    ascending = array[order]
    first, stop = _runs(ascending[1:] != ascending[:-1], array.size)
    return Ranking(order, first, stop, array)


def spearman(ranking: Ranking, positive: Bools) -> float:
    """Spearman's rho, with average ranks, between a signal and a 0/1 label over all tokens.

    Parameters
    ----------
    ranking : Ranking
        Of the signal.
    positive : array, shape (tokens,)
        The label, in the order of the unsorted values.

    Returns
    -------
    float
        In [-1, 1]; positive = the signal is larger where the label is 1. NaN where signal or label is
        constant.
    """
    n = ranking.order.size
    n_positive = int(np.count_nonzero(positive))
    if ranking.constant or n_positive in (0, n):
        return math.nan
    centred = 0.5 * (ranking.first + ranking.stop - n)
    shared = float(centred[positive[ranking.order]].sum())
    variance = float(centred @ centred) * n_positive * (n - n_positive) / n
    return float(np.clip(shared / math.sqrt(variance), -1.0, 1.0))


def spearman_within(ranking: Ranking, positive: Bools, traces: NDArray[np.integer], n_traces: int) -> Floats:
    """Spearman's rho within each trace, so that differences between traces play no part.

    Parameters
    ----------
    ranking : Ranking
        Of the signal over all tokens.
    positive : array, shape (tokens,)
    traces : array, shape (tokens,)
        Trace of each token, 0..n_traces-1.
    n_traces : int

    Returns
    -------
    array, shape (n_traces,)
        Signed as in `spearman`; NaN where signal or label is constant within the trace.
    """
    if ranking.order.size == 0:
        return np.full(n_traces, np.nan)
    order, centred = _ranks_by_trace(ranking, traces, n_traces)
    size, owner = np.bincount(traces, minlength=n_traces), traces[order]
    hit = positive[order]
    shared = np.bincount(owner[hit], weights=centred[hit], minlength=n_traces)
    rank_variance = np.bincount(owner, weights=centred * centred, minlength=n_traces)
    n_positive = np.bincount(owner[hit], minlength=n_traces)
    variance = rank_variance * n_positive * (size - n_positive)
    rho = np.full(n_traces, np.nan)
    usable = variance > 0
    rho[usable] = shared[usable] * np.sqrt(size[usable] / variance[usable])
    return np.clip(rho, -1.0, 1.0)


def centred_ranks(ranking: Ranking) -> Floats:
    """Average ranks less their mean, one per value in the unsorted order."""
    ranks = np.empty(ranking.order.size)
    ranks[ranking.order] = 0.5 * (ranking.first + ranking.stop - ranking.order.size)
    return ranks


def centred_ranks_within(ranking: Ranking, traces: NDArray[np.integer], n_traces: int) -> Floats:
    """Average ranks within each trace less their mean there, one per value in the unsorted order."""
    ranks = np.empty(ranking.order.size)
    if ranks.size:
        order, centred = _ranks_by_trace(ranking, traces, n_traces)
        ranks[order] = centred
    return ranks


def correlate_ranks(ranks: Floats, others: Floats) -> float:
    """Spearman's rho of two sets of centred ranks; NaN where one is constant."""
    variance = float(ranks @ ranks) * float(others @ others)
    return (
        float(np.clip(float(ranks @ others) / math.sqrt(variance), -1.0, 1.0)) if variance > 0 else math.nan
    )


def correlate_ranks_within(
    ranks: Floats, others: Floats, traces: NDArray[np.integer], n_traces: int
) -> Floats:
    """Spearman's rho per trace of two sets of ranks centred within traces; NaN where one is constant there."""

    def sums(products: Floats) -> Floats:
        return np.bincount(traces, weights=products, minlength=n_traces).astype(np.float64)

    variance = sums(ranks * ranks) * sums(others * others)
    rho = np.full(n_traces, np.nan)
    usable = variance > 0
    rho[usable] = sums(ranks * others)[usable] / np.sqrt(variance[usable])
    return np.clip(rho, -1.0, 1.0)


def pairwise_wins(
    ranking: Ranking, positive: Bools, clusters: NDArray[np.integer], n_clusters: int
) -> Floats:
    """How often a positive of one cluster outranks a negative of another: the Mann-Whitney counts.

    With `U` this matrix, and P and N the positives and negatives per cluster, the AUROC of a resample in
    which cluster a appears c[a] times is `c @ U @ c / ((c @ P) * (c @ N))`: a bootstrap needs no second look
    at the tokens.

    Parameters
    ----------
    ranking : Ranking
        Of the signal.
    positive : array, shape (tokens,)
    clusters : array, shape (tokens,)
        Cluster of each token, 0..n_clusters-1.
    n_clusters : int

    Returns
    -------
    array, shape (n_clusters, n_clusters)
        `[a, b]`: pairs of a positive of a and a negative of b in which the positive's value is larger, plus
        half the ties. Exact (multiples of 1/2).
    """
    from scipy.sparse import csr_array

    hit, owner = positive[ranking.order], clusters[ranking.order].astype(np.int64)
    seen = np.concatenate([[0], np.cumsum(hit)])  # positives among the i smallest values
    miss = ~hit
    # In ascending order of the positives, a negative ties with numbers low..high-1 and loses to those after.
    low, high = seen[ranking.first[miss]], seen[ranking.stop[miss]]
    loser, winner = owner[miss], owner[hit]
    twice = np.zeros((n_clusters, n_clusters))
    carried = np.zeros(n_clusters)
    rows = max(1, BLOCK_CELLS // max(1, n_clusters))
    for start in range(0, winner.size, rows):
        stop = min(start + rows, winner.size)
        steps = np.zeros((stop - start) * n_clusters)
        for edge in (low, high):
            within = slice(*np.searchsorted(edge, (start, stop)))
            cells = (edge[within] - start) * n_clusters + loser[within]
            steps += np.bincount(cells, minlength=steps.size)
        losses = steps.reshape(-1, n_clusters)
        losses[0] += carried
        np.cumsum(losses, axis=0, out=losses)
        carried = losses[-1].copy()
        ones, members = np.ones(stop - start), np.arange(stop - start + 1)
        by_positive = csr_array((ones, winner[start:stop], members), shape=(stop - start, n_clusters))
        twice += np.asarray(by_positive.T @ losses)
    return twice / 2


def auroc(values: ArrayLike, truth: ArrayLike) -> float:
    """Chance that a token with truth 1 has a larger value than one with truth 0, ties counting one half.

    Parameters
    ----------
    values : array, shape (tokens,)
        Finite.
    truth : array, shape (tokens,)
        0/1 or boolean: a label, or a planted truth that a label is to recover.

    Returns
    -------
    float
        0.5 = no information, above = larger values where truth is 1. NaN with one class only.
    """
    positive = np.asarray(truth).astype(bool)
    n_positive = int(np.count_nonzero(positive))
    n_pairs = n_positive * (positive.size - n_positive)
    if n_pairs == 0:
        return math.nan
    ranking = rank(values)
    average = 0.5 * (ranking.first + ranking.stop + 1)
    rank_sum = float(average[positive[ranking.order]].sum())
    return (rank_sum - n_positive * (n_positive + 1) / 2) / n_pairs


def _ranks_by_trace(ranking: Ranking, traces: NDArray[np.integer], n_traces: int) -> tuple[Ints, Floats]:
    """Tokens trace by trace, ascending within each, and their average ranks there less the mean."""
    n = ranking.order.size
    # The pooled order, stably regrouped by trace, is the order within each trace: no second float sort.
    # numpy sorts 16-bit integers in linear time.
    codes = traces.astype(np.int16 if n_traces <= np.iinfo(np.int16).max else np.int64)
    order = ranking.order[np.argsort(codes[ranking.order], kind="stable")]
    values, owner = ranking.values[order], traces[order]
    first, stop = _runs((values[1:] != values[:-1]) | (owner[1:] != owner[:-1]), n)
    size = np.bincount(traces, minlength=n_traces)
    end = np.cumsum(size)
    return order, 0.5 * (first + stop - (2 * end - size)[owner])


def _runs(changes: Bools, n: int) -> tuple[Ints, Ints]:
    """First and one-past-last place of each place's run, given where neighbours differ."""
    starts = np.flatnonzero(np.concatenate([np.ones(min(n, 1), dtype=bool), changes]))
    sizes = np.diff(starts, append=n)
    return np.repeat(starts, sizes), np.repeat(starts + sizes, sizes)
