"""Does validity offline carry over to accuracy online? Rank correlation over policies."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cfkv.analysis import _arms
from cfkv.analysis.compare import SIGNIFICANCE
from cfkv.analysis.intervals import MIN_UNITS
from cfkv.analysis.multiplicity import adjust
from cfkv.errors import CfkvError
from cfkv.schemas import OFFLINE_ONLINE

# Policies that see the labels against which offline measures are taken.
LABEL_MADE = ("oracle", "anti_oracle", "shuffled_oracle")
EXCLUDED = (*LABEL_MADE, _arms.FULL)
STATISTICS = ("spearman", "kendall")

Floats = NDArray[np.float64]


def offline_online(
    validity: pl.DataFrame,
    accuracy: pl.DataFrame,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
    *,
    exclude: Collection[str] = EXCLUDED,
) -> pl.DataFrame:
    """Correlate an offline measure with accuracy at a budget, over policies.

    Parameters
    ----------
    validity : DataFrame
        Columns policy, measure, value: one value per policy and measure, larger = better unless the reader knows
        otherwise (a regret should correlate negatively). With a column parameters, arms are matched by it too;
        without one, only arms with the policy's defaults enter.
    accuracy : DataFrame
        The table `policy_accuracy`.
    level, draws, seed :
        Of the bootstrap over policies, and of the permutations.
    exclude : collection of str
        Policies left out of the rows `without_excluded`. Those made from labels agree with labels by construction,
        and with them alone any measure looks predictive.

    Returns
    -------
    DataFrame
        The table `offline_online`, sorted by its key: per measure, mode, positions, budget and statistic one row over
        all policies that have both numbers and one without those excluded. Spearman's rho and Kendall's tau-b;
        positive = a larger measure goes with more accuracy. The interval is the percentile one over policies drawn
        with replacement (draws in which a side is constant are dropped); p is the share of permutations with a
        correlation at least as large, two-sided, with 1 added to both counts, adjusted by Benjamini-Hochberg over the
        measures and budgets of one mode, positions, statistic and set of policies. `note` says what is not
        significant, or why there is no estimate: fewer than 4 policies, or a side that is constant.

    Raises
    ------
    CfkvError
        If a policy has two values of one measure.

    Notes
    -----
    Policies are no random sample: variants of one method repeat each other, and all share the traces. The interval
    speaks of policies like these. Accuracy is itself an estimate, which pulls the correlation towards 0.
    """
    names = ["policy", "parameters"] if "parameters" in validity.columns else ["policy"]
    twice = validity.filter(validity.select(*names, "measure").is_duplicated())
    if twice.height:
        shown = twice.select(*names, "measure").row(0, named=True)
        raise CfkvError(f"validity: {shown} has more than one value; pass one per policy and measure")
    if "parameters" not in names:
        validity = validity.with_columns(parameters=pl.lit(""))
    measured = validity.select("policy", "measure", "value", pl.col("parameters").fill_null(""))
    finite = pl.col("value").is_finite() & pl.col("accuracy").is_finite()
    pairs = measured.join(accuracy, on=["policy", "parameters"]).filter(finite)
    found = []
    for place in _places(measured, accuracy):
        here = pairs.filter(pl.all_horizontal(pl.col(name) == value for name, value in place.items()))
        here = here.sort("policy", "parameters")
        for label, rows in (
            ("all", here),
            ("without_excluded", here.filter(~pl.col("policy").is_in(list(exclude)))),
        ):
            values, accuracies = (rows[name].cast(pl.Float64).to_numpy() for name in ("value", "accuracy"))
            for statistic in STATISTICS:
                row = _correlated(values, accuracies, statistic, level, draws, seed)
                found.append({**place, **row, "policies": label, "statistic": statistic, "level": level})
    return _arms.as_table(OFFLINE_ONLINE, _noted(found))


def _places(measured: pl.DataFrame, accuracy: pl.DataFrame) -> Iterator[dict[str, str]]:
    names = ("mode", "positions", "budget")
    found = accuracy.filter(pl.col("policy") != _arms.FULL).select(names).unique().sort(names)
    for measure in measured["measure"].unique().sort():
        for row in found.iter_rows(named=True):
            yield {"measure": measure, **row}


def _correlated(
    values: Floats, accuracies: Floats, statistic: str, level: float, draws: int, seed: int
) -> dict[str, Any]:
    """Estimate, interval and p of one statistic, or NaN and why."""
    n = values.size
    row: dict[str, Any] = {**dict.fromkeys(("estimate", "low", "high", "pvalue"), math.nan), "n_policies": n}
    if n < MIN_UNITS:
        return row | {"note": f"no estimate: {n} policies, fewer than {MIN_UNITS}"}
    if np.ptp(values) == 0 or np.ptp(accuracies) == 0:
        side = "measure" if np.ptp(values) == 0 else "accuracy"
        return row | {"note": f"no estimate: the same {side} for all policies"}
    pairs = _Pairs(values, accuracies)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float64)
    drawn = pairs.resampled(counts, statistic)
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]) if drawn.size else (math.nan, math.nan)
    estimate = float(pairs.resampled(np.ones((1, n)), statistic)[0])
    chance = pairs.permuted(rng.permuted(np.tile(np.arange(n), (draws, 1)), axis=1), statistic)
    beyond = int((np.abs(chance) >= abs(estimate) - 1e-9).sum())
    pvalue = (1 + beyond) / (1 + draws)
    return row | {"estimate": estimate, "low": float(low), "high": float(high), "pvalue": pvalue}


@dataclass(frozen=True)
class _Pairs:
    """Two values per policy; correlations of resamples (how often each policy is drawn) and of permutations.

    Drawing a policy twice makes a pair of ties, which ranks and signs of the distinct values already know: nothing is
    sorted per draw.
    """

    one: Floats
    other: Floats

    def resampled(self, counts: Floats, statistic: str) -> Floats:
        """Shape (draws,); NaN where a side is constant."""
        if statistic == "kendall":
            first, second = _signs(self.one), _signs(self.other)
            shared, left, right = (
                np.einsum("di,ij,dj->d", counts, signs, counts, optimize=True)
                for signs in (first * second, first**2, second**2)
            )
        else:
            first, second = (_drawn_ranks(values, counts) for values in (self.one, self.other))
            shared, left, right = (
                (counts * product).sum(axis=1) for product in (first * second, first**2, second**2)
            )
        return _ratio(shared, left, right)

    def permuted(self, orders: NDArray[np.int64], statistic: str) -> Floats:
        """Shape (draws,): `other` in each of these orders against `one`."""
        ones = np.ones((1, self.one.size))
        if statistic == "spearman":
            first, second = (_drawn_ranks(values, ones)[0] for values in (self.one, self.other))
            return _ratio(second[orders] @ first, first @ first, second @ second)
        first, second = _signs(self.one), _signs(self.other)
        shared = np.array([(first * second[np.ix_(order, order)]).sum() for order in orders])
        return _ratio(shared, (first**2).sum(), (second**2).sum())


def _ratio(shared: Floats, left: Any, right: Any) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(shared / np.sqrt(left * right), dtype=np.float64)


def _signs(values: Floats) -> Floats:
    return np.sign(values[:, None] - values[None, :])


def _drawn_ranks(values: Floats, counts: Floats) -> Floats:
    """Average ranks of the values within each resample, less their mean; shape (draws, values)."""
    below = (values[:, None] < values[None, :]).astype(np.float64)
    above = below.T
    # Twice the centred average rank is the number below less the number above.
    return counts @ (below - above)


def _noted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with adjusted p-values, and a note where a correlation is not significant."""
    families: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        family = tuple(row[name] for name in ("mode", "positions", "policies", "statistic"))
        families.setdefault(family, []).append(row)
    for members in families.values():
        adjusted = adjust([row["pvalue"] for row in members], "benjamini_hochberg")
        for row, value in zip(members, adjusted, strict=True):
            row["adjusted_pvalue"] = float(value)
            if not math.isnan(value) and value >= SIGNIFICANCE:
                row["note"] = f"not significant over {row['n_policies']} policies, adjusted p {value:.3f}"
    return rows
