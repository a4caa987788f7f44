"""Correction for many tests at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


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
    raw = np.asarray(pvalues, dtype=np.float64)
    adjusted = np.full(raw.shape, np.nan)
    made = ~np.isnan(raw)
    if made.any():
        from statsmodels.stats.multitest import multipletests

        adjusted[made] = multipletests(raw[made], method="fdr_bh")[1]
    return adjusted
