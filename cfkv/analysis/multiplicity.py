"""Correction for many tests at once.

Written out, since statsmodels' `multipletests` collects all garbage on every call: a quarter of a second each beside
large tables. The tests hold it to that function, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cfkv.errors import unknown_name

Correction = Literal["holm", "benjamini_hochberg"]
Floats = NDArray[np.float64]


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
    return adjust(pvalues, "benjamini_hochberg")


def adjust(pvalues: ArrayLike, correction: Correction) -> Floats:
    """Adjusted p-values.

    Parameters
    ----------
    pvalues : array, shape (tests,)
        NaN marks a test that could not be made: it stays NaN and is not counted among the tests.
    correction : str
        holm (the chance of any false finding is held) or benjamini_hochberg (the share of false findings is).

    Returns
    -------
    array, shape (tests,)

    Raises
    ------
    CfkvError
        For another correction.
    """
    if correction not in _RULES:
        raise unknown_name("correction", correction, list(_RULES))
    raw = np.asarray(pvalues, dtype=np.float64)
    adjusted = np.full(raw.shape, np.nan)
    made = np.flatnonzero(~np.isnan(raw))
    order = made[np.argsort(raw[made])]
    adjusted[order] = np.minimum(_RULES[correction](raw[order]), 1.0)
    return adjusted


def _step_down(rising: Floats) -> Floats:
    return np.maximum.accumulate(rising * np.arange(rising.size, 0, -1))


def _step_up(rising: Floats) -> Floats:
    shares = np.arange(1, rising.size + 1) / float(rising.size)
    return np.minimum.accumulate((rising / shares)[::-1])[::-1]


_RULES: Mapping[str, Callable[[Floats], Floats]] = {"holm": _step_down, "benjamini_hochberg": _step_up}
