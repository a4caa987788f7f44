"""Causal smoothings of a signal in generation order (EpiKV; methods.md 3.1).

Every function works along the last axis, so that the layers of one trace are smoothed in one call, and
restarts at its first element: slice a trace's reasoning span first. Value t depends on values <= t only.

Missing values (NaN or infinite, such as the difference of token 0 to a token that does not exist) stay NaN
in the output, and are left out of the averages and spreads of the positions after them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cfkv.errors import unknown_name

Floats = NDArray[np.float64]

# Added to the standard deviation of the rolling z-score; the value of the EpiKV authors.
Z_EPSILON = 1e-6

SMOOTHINGS = ("raw", "ema", "rolling_mean", "rolling_z")


def smooth(values: ArrayLike, smoothing: str, *, alpha: float = 0.9, window: int = 64) -> Floats:
    """Apply the smoothing called `smoothing` along the last axis.

    Parameters
    ----------
    values : array, shape (..., tokens)
        A signal in generation order, from the first reasoning token on.
    smoothing : str
        raw, ema, rolling_mean or rolling_z.
    alpha : float
        Weight of the newest value in the EMA.
    window : int
        Tokens in the trailing window of rolling_mean and rolling_z.

    Returns
    -------
    array, shape (..., tokens), float64
        In the unit of the signal; rolling_z is in standard deviations of the window.

    Raises
    ------
    CfkvError
        For an unknown smoothing.
    """
    if smoothing == "raw":
        return _missing_as_nan(values)
    if smoothing == "ema":
        return ema(values, alpha)
    if smoothing == "rolling_mean":
        return rolling_mean(values, window)
    if smoothing == "rolling_z":
        return rolling_z(values, window)
    raise unknown_name("smoothing", smoothing, SMOOTHINGS)


def ema(values: ArrayLike, alpha: float) -> Floats:
    """Exponential moving average `m = alpha * g + (1 - alpha) * m_prev`, seeded with the first present value.

    Parameters
    ----------
    values : array, shape (..., tokens)
    alpha : float
        Weight of the NEWEST value, in (0, 1]. EpiKV prints only "alpha = 0.9"; its notes put 0.9 on the new
        value (nearly raw). For the other reading, 0.9 on the past, pass 0.1.

    Returns
    -------
    array, shape (..., tokens)
        Missing positions are NaN and leave the average as it was.

    Raises
    ------
    ValueError
        If alpha is outside (0, 1].
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha = {alpha} is not in (0, 1]; it is the weight of the newest value")
    clean = _missing_as_nan(values)
    rows = clean.reshape(math.prod(clean.shape[:-1]), clean.shape[-1])
    missing = np.isnan(rows)
    if not missing.any():
        return _ema_of_complete(rows, alpha).reshape(clean.shape)
    averaged = np.full_like(rows, np.nan)
    for row, present, target in zip(rows, ~missing, averaged, strict=True):
        target[present] = _ema_of_complete(row[None, present], alpha)[0]
    return averaged.reshape(clean.shape)


def rolling_mean(values: ArrayLike, window: int) -> Floats:
    """Mean over the trailing `window` values, the newest included; shorter at the start.

    Parameters
    ----------
    values : array, shape (..., tokens)
    window : int
        At least 1.

    Returns
    -------
    array, shape (..., tokens)
    """
    clean = _missing_as_nan(values)
    _, mean, _ = _trailing_moments(clean, window)
    return np.where(np.isnan(clean), np.nan, mean)


def rolling_z(values: ArrayLike, window: int) -> Floats:
    """Deviation from the trailing mean in trailing standard deviations: `(g - mean) / (std + 1e-6)`.

    The standard deviation is the population one, over the same values as `rolling_mean`; a position whose
    window holds fewer than 2 values gets 0. This is EpiKV's detrended signal: a constant gives 0, and a slow
    trend nearly drops out.

    Parameters
    ----------
    values : array, shape (..., tokens)
    window : int
        At least 1.

    Returns
    -------
    array, shape (..., tokens)
        Standard deviations, signed: positive where the newest value is above its recent mean.
    """
    clean = _missing_as_nan(values)
    count, mean, spread = _trailing_moments(clean, window)
    std = np.sqrt(spread / np.maximum(count, 1))
    z = (clean - mean) / (std + Z_EPSILON)
    return np.where((count < 2) & ~np.isnan(clean), 0.0, z)


def _missing_as_nan(values: ArrayLike) -> Floats:
    clean = np.array(values, dtype=np.float64, ndmin=1)
    clean[~np.isfinite(clean)] = np.nan
    return clean


def _ema_of_complete(rows: Floats, alpha: float) -> Floats:
    if rows.shape[-1] == 0:
        return rows
    from scipy.signal import lfilter

    # Filtering deviations from the first value seeds the average with it, and keeps a constant row exactly
    # constant: rounding noise there would turn ties into ranks.
    first = rows[:, :1]
    return first + lfilter([alpha], [1.0, alpha - 1.0], rows - first, axis=-1)


# Counts have the shape (tokens,) when nothing is missing, else that of the values.
Moments = tuple[NDArray[Any], Floats, Floats]


def _trailing_moments(values: Floats, window: int) -> Moments:
    """Count, mean and sum of squared deviations of the present values among the trailing `window`.

    Blocks of 1, 2, 4, ... values are merged (Chan, Golub and LeVeque 1983). Unlike differences of cumulative
    sums, no value outside a window touches its result: equal windows give equal moments to the last bit, and
    a window of equal values has a spread of exactly 0.
    """
    if window < 1:
        raise ValueError(f"window = {window} is below 1; it counts tokens, the newest included")
    missing = np.isnan(values)
    if missing.any():
        count: NDArray[Any] = (~missing).astype(np.float64)
    else:
        count = np.ones(values.shape[-1])
    block: Moments = (count, np.where(missing, 0.0, values), np.zeros_like(values))
    total: Moments | None = None
    covered, length = 0, 1
    while True:
        if window & length:
            total = block if total is None else _merge(total, _delayed(block, covered))
            covered += length
        if 2 * length > window:
            break
        block = _merge(block, _delayed(block, length))
        length *= 2
    return total if total is not None else block


def _merge(newer: Moments, older: Moments) -> Moments:
    count = newer[0] + older[0]
    share = older[0] / np.maximum(count, 1)
    delta = older[1] - newer[1]
    return count, newer[1] + delta * share, newer[2] + older[2] + delta * delta * (newer[0] * share)


def _delayed(block: Moments, steps: int) -> Moments:
    """The same blocks, ending `steps` positions earlier; empty before the first value."""
    count, mean, spread = (_shift(part, steps) for part in block)
    return count, mean, spread


def _shift(part: Floats, steps: int) -> Floats:
    shifted = np.zeros_like(part)
    if steps < part.shape[-1]:
        shifted[..., steps:] = part[..., : part.shape[-1] - steps]
    return shifted
