"""Correction for many tests at once.

Written out, since statsmodels' `multipletests` collects all garbage on every call: a quarter of a second each beside
large tables. tests/analysis hold both to it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def holm(pvalues: ArrayLike) -> Floats:
    """Holm's adjusted p-values: rejecting those below alpha holds the chance of any false rejection at alpha.

    Parameters
    ----------
    pvalues : array, shape (tests,)
        NaN marks a test that could not be made: it stays NaN and is not counted among the tests.

    Returns
    -------
    array, shape (tests,)
    """
    return _adjusted(pvalues, lambda rising: np.maximum.accumulate(rising * np.arange(rising.size, 0, -1)))


def benjamini_hochberg(pvalues: ArrayLike) -> Floats:
    """Benjamini-Hochberg adjusted p-values: rejecting those below q holds the false discovery rate at q.

    Parameters
    ----------
    pvalues : array, shape (tests,)
        NaN marks a test that could not be made: it stays NaN and is not counted among the tests.

    Returns
    -------
    array, shape (tests,)
    """

    def step_up(rising: Floats) -> Floats:
        shares = np.arange(1, rising.size + 1) / float(rising.size)
        return np.minimum.accumulate((rising / shares)[::-1])[::-1]

    return _adjusted(pvalues, step_up)


def _adjusted(pvalues: ArrayLike, rule: Callable[[Floats], Floats]) -> Floats:
    """`rule` turns rising p-values into adjusted ones, which are then at most 1."""
    raw = np.asarray(pvalues, dtype=np.float64)
    adjusted = np.full(raw.shape, np.nan)
    made = np.flatnonzero(~np.isnan(raw))
    order = made[np.argsort(raw[made])]
    adjusted[order] = np.minimum(rule(raw[order]), 1.0)
    return adjusted
