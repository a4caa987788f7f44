"""Correction for many tests at once."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cfkv.errors import unknown_name

Correction = Literal["holm", "benjamini_hochberg"]
_STATSMODELS_NAMES = {"holm": "holm", "benjamini_hochberg": "fdr_bh"}


def benjamini_hochberg(pvalues: ArrayLike) -> NDArray[np.float64]:
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


def adjust(pvalues: ArrayLike, correction: Correction) -> NDArray[np.float64]:
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
    if correction not in _STATSMODELS_NAMES:
        raise unknown_name("correction", correction, list(_STATSMODELS_NAMES))
    raw = np.asarray(pvalues, dtype=np.float64)
    adjusted = np.full(raw.shape, np.nan)
    made = ~np.isnan(raw)
    if made.any():
        from statsmodels.stats.multitest import multipletests

        adjusted[made] = multipletests(raw[made], method=_STATSMODELS_NAMES[correction])[1]
    return adjusted
