"""Closed-form intervals: Fisher z with the trace as the unit, and Wilson.

Tokens of one trace are not independent, so the sample size is a number of traces (or of problems, where one
problem has several traces), never of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Correlations are held to this before Fisher's z, which is infinite at 1: z = 3.80 at most, so that one short
# trace with perfect agreement does not outweigh all others.
RHO_LIMIT = 0.999

# Fisher's z has the variance 1 / (n - 3).
MIN_UNITS = 4


@dataclass(frozen=True)
class Estimate:
    """An estimate with its interval and two-sided p-value; all NaN with a `reason` when there is none."""

    estimate: float
    low: float
    high: float
    pvalue: float
    reason: str | None = None


@dataclass(frozen=True)
class WithinEstimate(Estimate):
    """`Estimate` over traces, with the traces used and those dropped as constant."""

    n_traces: int = 0
    n_dropped: int = 0


def undefined(reason: str) -> Estimate:
    """No estimate, and why."""
    return Estimate(math.nan, math.nan, math.nan, math.nan, reason)


def too_few(n_traces: int, n_units: int | None = None, least: int = MIN_UNITS) -> str | None:
    """The reason when there are fewer than `least` independent units, else None."""
    if n_traces < least:
        return f"n_traces < {least}"
    if n_units is not None and n_units < least:
        return f"n_problems < {least}"
    return None


def fisher_z_interval(rho: float, n_traces: int, level: float = 0.95) -> Estimate:
    """Interval and p-value of a pooled correlation: `tanh(atanh(rho) +- z / sqrt(n_traces - 3))`.

    Parameters
    ----------
    rho : float
        In [-1, 1]; beyond +-0.999 the interval is that of 0.999, widened to contain rho.
    n_traces : int
        Independent units. EpiKV's printed n_eff of 352 for 355 traces is n_traces - 3.
    level : float
        Confidence level.

    Returns
    -------
    Estimate
        The p-value is two-sided normal, from `atanh(rho) * sqrt(n_traces - 3)`. Undefined for a NaN rho, or
        fewer than 4 traces.

    References
    ----------
    EpiKV, correlation study; methods.md 5.2.
    """
    from scipy.special import ndtr, ndtri

    if math.isnan(rho):
        return undefined("no correlation")
    reason = too_few(n_traces)
    if reason:
        return undefined(reason)
    z = math.atanh(min(max(rho, -RHO_LIMIT), RHO_LIMIT))
    scale = math.sqrt(n_traces - 3)
    half = float(ndtri(0.5 + level / 2)) / scale
    low, high = min(math.tanh(z - half), rho), max(math.tanh(z + half), rho)
    return Estimate(rho, low, high, float(2 * ndtr(-abs(z) * scale)))


def within_interval(
    rhos: NDArray[np.float64], clusters: NDArray[np.integer] | None = None, level: float = 0.95
) -> WithinEstimate:
    """Average the correlations within traces: mean Fisher z, equal weights, t-interval over traces.

    Parameters
    ----------
    rhos : array, shape (traces,)
        One correlation per trace; NaN (signal or label constant) is dropped and counted.
    clusters : array, shape (traces,), optional
        Problem of each trace. With several traces of one problem the standard error is the cluster-robust
        one and the degrees of freedom are problems - 1; with one each this is the ordinary t-interval.
    level : float

    Returns
    -------
    WithinEstimate
        `estimate = tanh(mean z)`, each |rho| held to 0.999. Undefined with fewer than 2 usable traces (or
        problems). When all traces agree exactly a t-test would say p = 0, however few there are: then the
        p-value is that of the sign test, `2 ** (1 - units)`, or 1 for a mean of 0.
    """
    from scipy.special import stdtr, stdtrit

    usable = np.isfinite(rhos)
    n, n_dropped = int(usable.sum()), int((~usable).sum())
    units = np.arange(rhos.size) if clusters is None else clusters
    _, owner = np.unique(units[usable], return_inverse=True)
    n_units = int(owner.max()) + 1 if n else 0
    if n_units < 2:
        reason = f"fewer than 2 usable {'traces' if n < 2 else 'problems'}"
        return WithinEstimate(math.nan, math.nan, math.nan, math.nan, reason, n, n_dropped)
    z = np.arctanh(np.clip(rhos[usable], -RHO_LIMIT, RHO_LIMIT))
    mean = float(z.mean())
    by_unit = np.bincount(owner, weights=z - mean)
    error = math.sqrt(n_units / (n_units - 1) * float(by_unit @ by_unit)) / n
    half = float(stdtrit(n_units - 1, 0.5 + level / 2)) * error
    if error > 1e-12:
        pvalue = float(2 * stdtr(n_units - 1, -abs(mean) / error))
    else:
        pvalue = 2.0 ** (1 - n_units) if abs(mean) > 1e-12 else 1.0
    return WithinEstimate(
        math.tanh(mean), math.tanh(mean - half), math.tanh(mean + half), pvalue, None, n, n_dropped
    )


def wilson_interval(successes: int, total: int, level: float = 0.95) -> Estimate:
    """Wilson's score interval of a proportion, without continuity correction.

    Parameters
    ----------
    successes, total : int
        `0 <= successes <= total`.
    level : float

    Returns
    -------
    Estimate
        The proportion with its interval; no hypothesis is tested, so the p-value is NaN. Undefined for
        `total = 0`.

    Raises
    ------
    ValueError
        If successes is outside 0..total.

    References
    ----------
    PAGE, recovery tables; methods.md 7.
    """
    from scipy.special import ndtri

    if not 0 <= successes <= total:
        raise ValueError(f"successes = {successes} is outside 0..{total}; pass counts, not a rate")
    if total == 0:
        return undefined("no trials")
    share = successes / total
    z2 = float(ndtri(0.5 + level / 2)) ** 2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = math.sqrt(z2 * (share * (1 - share) / total + z2 / (4 * total**2))) / (1 + z2 / total)
    # At 0 and total the bound is the share itself; rounding would leave it off by 1e-18.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return Estimate(share, low, high, math.nan)
