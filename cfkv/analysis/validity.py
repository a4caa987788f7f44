"""How well a policy's scores find what a label calls important: one trace, one moment, no decoding.

A policy scores its tables: one where all layers share a keep set, else one per layer or per layer and KV head. Two
views of them are held against the labels of the candidates (the tested tokens that are cached):

- one number per token, its percentile rank among the candidates, averaged over tables: rho, rho_value, auroc,
  average_precision, ndcg;
- the share of tables that keep it, each with the same budget: recall, overlap, regret.

Label mass is the graded value, clipped at 0, of kinds that store a value and no verdict, else the 0/1 importance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cfkv.analysis.association import auroc, centred_ranks, correlate_ranks, rank

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SCORE_MEASURES = ("rho", "rho_value", "auroc", "average_precision", "ndcg")
KEEP_MEASURES = ("recall", "overlap", "regret")
NO_CANDIDATE, NO_IMPORTANT, ONE_CLASS = "no tested token", "no important token", "one class only"
CONSTANT, CONSTANT_VALUE, NO_MASS = "constant score", "constant value", "no label mass"


@dataclass(frozen=True)
class Truth:
    """What is known of the candidates, in the order of their positions.

    Attributes
    ----------
    important : array, shape (tokens,)
        The 0/1 label.
    label : array, shape (tokens,)
        What the oracle ranks by: the graded value of kinds without a verdict, else the importance.
    values : array, shape (tokens,)
        The graded value of any kind; NaN where there is none.
    """

    important: Bools
    label: Floats
    values: Floats

    @property
    def mass(self) -> Floats:
        """The label, clipped at 0."""
        return np.maximum(self.label, 0.0)


@dataclass(frozen=True)
class Measured:
    """One measure; NaN with a reason, `share` None where it knows no budget."""

    measure: str
    share: float | None
    value: float
    reason: str | None = None


def judge(scores: NDArray[np.floating], truth: Truth, shares: Sequence[float]) -> list[Measured]:
    """Every measure of one policy on one trace.

    Parameters
    ----------
    scores : array, shape (tables, candidates)
        Higher = keep; candidates in the order of their positions. Other tokens play no part: neither what the policy
        protects nor how it shares a budget out is judged, only whom it prefers.
    truth : Truth
    shares : sequence of float
        Budgets, as shares of the candidates.
    """
    if truth.important.size == 0:
        names = [(name, None) for name in SCORE_MEASURES] + [(n, s) for s in shares for n in KEEP_MEASURES]
        return [Measured(name, share, math.nan, NO_CANDIDATE) for name, share in names]
    number = mean_percentile(scores)
    found = [
        _measured("rho", rho(number, truth.important)),
        _measured("rho_value", rho_value(number, truth.values)),
        _measured("auroc", _auroc(number, truth.important)),
        _measured("average_precision", average_precision(number, truth.important)),
        _measured("ndcg", ndcg(number, truth.mass)),
    ]
    for share in shares:
        count = kept_count(share, truth.important.size)
        kept, best = keep_shares(scores, count), keep_shares(truth.label[None], count)
        found += [
            _measured("recall", recall(kept, truth.important), share),
            _measured("overlap", (overlap(kept, best), None), share),
            _measured("regret", regret(kept, best, truth.mass), share),
        ]
    return found


Outcome = tuple[float, str | None]


def _measured(name: str, outcome: Outcome, share: float | None = None) -> Measured:
    return Measured(name, share, *outcome)


def mean_percentile(scores: NDArray[np.floating]) -> Floats:
    """Percentile rank of each token within each table (0 lowest, 1 highest, ties averaged), averaged over tables.

    Parameters
    ----------
    scores : array, shape (tables, tokens)

    Returns
    -------
    array, shape (tokens,)
        0.5 for a single token. Ranks are summed before they are divided, so that equal sums are equal floats.
    """
    from scipy.stats import rankdata

    tables, tokens = scores.shape
    if tokens == 1:
        return np.full(1, 0.5)
    total: Floats = (rankdata(scores, axis=1) - 1).sum(axis=0)
    return total / (tables * (tokens - 1))


def rho(number: Floats, important: Bools) -> Outcome:
    """Spearman's rho with the 0/1 label, average ranks on both sides."""
    if not important.any():
        return math.nan, NO_IMPORTANT
    if important.all():
        return math.nan, ONE_CLASS
    return _correlated(number, important.astype(np.float64))


def rho_value(number: Floats, values: Floats) -> Outcome:
    """Spearman's rho with the graded value, over the candidates that have one."""
    known = np.isfinite(values)
    if not known.any():
        return math.nan, "no graded value"
    if np.unique(values[known]).size == 1:
        return math.nan, CONSTANT_VALUE
    return _correlated(number[known], values[known])


def _correlated(number: Floats, label: Floats) -> Outcome:
    if np.unique(number).size == 1:
        return math.nan, CONSTANT
    return correlate_ranks(centred_ranks(rank(number)), centred_ranks(rank(label))), None


def _auroc(number: Floats, important: Bools) -> Outcome:
    if not important.any():
        return math.nan, NO_IMPORTANT
    return (math.nan, ONE_CLASS) if important.all() else (auroc(number, important), None)


def average_precision(number: Floats, important: Bools) -> Outcome:
    """Mean over important tokens of the precision at their place, best number first.

    Tied tokens have no order: the value is the expectation over all orders of them, in closed form. In a tie of t
    tokens behind f others, of which r and R are important, the place f + i is important with chance r / t, and then
    R + 1 + (i - 1)(r - 1) / (t - 1) important ones are expected up to it.

    References
    ----------
    McSherry and Najork, "Computing information retrieval performance measures efficiently in the presence of tied
    scores", ECIR 2008.
    """
    total = int(np.count_nonzero(important))
    if total == 0:
        return math.nan, NO_IMPORTANT
    score, before, seen = 0.0, 0, 0
    for size, hits in zip(*_ties(number, important.astype(np.float64)), strict=True):
        t, r = int(size), int(hits)
        i = np.arange(1, t + 1)
        expected = seen + 1 + (i - 1) * ((r - 1) / (t - 1) if t > 1 else 0.0)
        score += float((expected / (before + i)).sum()) * r / t
        before, seen = before + t, seen + r
    return score / total, None


def ndcg(number: Floats, mass: Floats) -> Outcome:
    """Discounted cumulative gain over that of the best order; gain: label mass, discount: 1 / log2(place + 1).

    Tied tokens share the discounts of their places, which is the expectation over all orders of them.
    """
    best = float(np.sort(mass)[::-1] @ _discounts(0, mass.size))
    if best == 0:
        return math.nan, NO_MASS
    gain, before = 0.0, 0
    for size, own in zip(*_ties(number, mass), strict=True):
        gain += float(_discounts(before, int(size)).sum()) * float(own) / int(size)
        before += int(size)
    return gain / best, None


def _discounts(before: int, size: int) -> Floats:
    return 1 / np.log2(np.arange(before + 2, before + size + 2))


def _ties(number: Floats, weights: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Sizes of the groups of equal numbers, largest number first, and the sum of weights of each."""
    _, owner, sizes = np.unique(-number, return_inverse=True, return_counts=True)
    sums: Floats = np.bincount(owner, weights=weights, minlength=sizes.size).astype(np.float64)
    return sizes.astype(np.int64), sums


def kept_count(share: float, tokens: int) -> int:
    """A share of the candidates as a number of them: rounded down as budgets are, at least one."""
    return max(1, int(share * tokens + 1e-9))


def keep_shares(scores: NDArray[np.floating], count: int) -> Floats:
    """Share of tables that keep each token, if each keeps its best `count`: higher score, then later position.

    Parameters
    ----------
    scores : array, shape (tables, tokens)
        Tokens in the order of their positions.
    """
    tables, tokens = scores.shape
    latest_first = np.argsort(-scores[:, ::-1], axis=1, kind="stable")[:, :count]
    kept = np.zeros((tables, tokens))
    np.put_along_axis(kept, tokens - 1 - latest_first, 1.0, axis=1)
    return kept.mean(axis=0)


def recall(kept: Floats, important: Bools) -> Outcome:
    """Important tokens kept, a token counting by its share of tables, over all important ones."""
    return (float(kept[important].mean()), None) if important.any() else (math.nan, NO_IMPORTANT)


def overlap(kept: Floats, best: Floats) -> float:
    """Jaccard index of two keep sets, sum of minima over sum of maxima where tokens are kept in part.

    The oracle's set is that of the policy `oracle`: among equal labels the later token is kept.
    """
    return float(np.minimum(kept, best).sum() / np.maximum(kept, best).sum())


def regret(kept: Floats, best: Floats, mass: Floats) -> Outcome:
    """Share of the label mass which the oracle keeps that is lost: 0 as good as the oracle, 1 nothing kept."""
    most = float(best @ mass)
    return (1 - float(kept @ mass) / most, None) if most > 0 else (math.nan, NO_MASS)
