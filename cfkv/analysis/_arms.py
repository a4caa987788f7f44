"""The table `evaluations` as the statistics read it: arms, their rows and their items.

An arm is (mode, policy, parameters, positions, budget). An item is a trace under one arm: its score is the mean over
its samples. The unit of every interval is the problem.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from cfkv.analysis.intervals import Estimate, undefined, wilson_interval
from cfkv.analysis.resampling import bootstrap_mean
from cfkv.errors import CfkvError
from cfkv.schemas import NOT_FAILURES, Table

ARM = ("mode", "policy", "parameters", "positions", "budget")
# A policy as it is named in tables.
NAME = ("policy", "parameters", "positions")
ABSOLUTE = "absolute"
FULL = "full"
# Statuses of rows that did not fail and were not run to their end either.
NOT_RUN = ("skipped", "excluded")
SAME_EVERYWHERE = "every problem has the same value: no resample differs"


def prepared(evaluations: pl.DataFrame) -> pl.DataFrame:
    """The rows with the flags failed, ran and graded, and `score` 0 or 1 where graded.

    Raises
    ------
    CfkvError
        If a trace has two rows of one arm and sample: every one would be counted.
    """
    status = pl.col("status").fill_null("")
    failed = ~status.is_in(sorted(NOT_FAILURES))
    ran = ~failed & ~status.is_in(NOT_RUN)
    frame = evaluations.with_columns(
        parameters=pl.col("parameters").fill_null(""),
        positions=pl.col("positions").fill_null(ABSOLUTE),
        problem_id=pl.coalesce("problem_id", "trace_id"),
        failed=failed,
        ran=ran,
        graded=ran & pl.col("correct").is_not_null(),
    ).with_columns(score=pl.when("graded").then(pl.col("correct").cast(pl.Float64)))
    key = [*ARM, "trace_id", "sample_index"]
    twice = frame.filter(frame.select(key).is_duplicated())
    if twice.height:
        shown = twice.select(key).row(0, named=True)
        raise CfkvError(f"evaluations: {shown} occurs more than once; pass the rows of one run")
    return frame


def items(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per arm and trace: problem_id, slots, n_samples, complete (all graded), and score where complete.

    An item of which a sample failed is not complete: a mean over those that are left would favour whatever fails.
    """
    return (
        rows.group_by(*ARM, "trace_id")
        .agg(
            pl.col("problem_id").first(),
            pl.col("slots").max(),
            n_samples=pl.len(),
            complete=pl.col("graded").all(),
            mean=pl.col("score").mean(),
        )
        .with_columns(score=pl.when("complete").then("mean"))
        .drop("mean")
        .sort(*ARM, "trace_id")
    )


def per_problem(rows: pl.DataFrame, column: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum of `column` and number of rows, shape (problems,)."""
    sums = rows.group_by("problem_id").agg(total=pl.col(column).sum(), size=pl.len()).sort("problem_id")
    return sums["total"].to_numpy().astype(np.float64), sums["size"].to_numpy().astype(np.float64)


def share_estimate(
    successes: NDArray[np.float64], totals: NDArray[np.float64], level: float, draws: int, seed: int
) -> tuple[Estimate, str]:
    """A share with an interval over problems, and the method of the interval: wilson, bootstrap, none.

    Parameters
    ----------
    successes, totals : array, shape (problems,)
        Totals above 0.

    Returns
    -------
    Estimate, str
        Wilson's interval where each problem has one row. Otherwise the bootstrap over problems, except at a share of 0
        or 1, where no resample differs: there Wilson's interval of so many problems. An estimate can stand without
        an interval; then the reason is that of the interval.
    """
    n_problems = totals.size
    if n_problems == 0:
        return undefined("no graded rows"), "none"
    right, total = float(successes.sum()), float(totals.sum())
    if (totals == 1).all():
        return wilson_interval(round(right), n_problems, level), "wilson"
    if right in (0.0, total):
        return wilson_interval(n_problems if right else 0, n_problems, level), "wilson"
    alone = Estimate(right / total, math.nan, math.nan, math.nan)
    if n_problems < 2:
        return dataclasses.replace(alone, reason="fewer than 2 problems"), "none"
    shares = successes / totals
    if np.ptp(shares) < 1e-12:
        return dataclasses.replace(alone, reason=SAME_EVERYWHERE), "none"
    return bootstrap_mean(successes, totals, draws, np.random.default_rng(seed), level), "bootstrap"


def mean(rows: pl.DataFrame, column: str) -> float:
    """Mean of the values that are neither null nor NaN; NaN if there are none."""
    found = rows[column].cast(pl.Float64).fill_nan(None).drop_nulls()
    return float(np.mean(found.to_numpy())) if len(found) else math.nan


def share(part: int, whole: int) -> float:
    """NaN of nothing."""
    return part / whole if whole else math.nan


def as_table(table: Table, rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows as a frame with the declared columns, sorted by the key; what a row leaves out is null, NaN stays NaN."""
    made = list(rows)
    arrays = [pa.array([row.get(f.name) for row in made], type=f.type) for f in table.schema]
    frame = pl.DataFrame(pl.from_arrow(pa.table(arrays, schema=table.schema)))
    return frame.sort(table.key)


def policy_name(policy: str, parameters: str, positions: str) -> str:
    """`h2o`, `h2o recent_share=0.25`, or `h2o positions=compact`."""
    moved = "" if positions == ABSOLUTE else f"positions={positions}"
    return " ".join(part for part in (policy, parameters, moved) if part)


def asked_tokens() -> pl.Expr:
    """A budget in tokens as a number, null for those in other units: what is known of an arm that failed everywhere."""
    return pl.col("budget").cast(pl.Float64, strict=False)


def budgets_in_order(accuracy: pl.DataFrame) -> list[str]:
    """The budgets as asked, from the smallest to the largest mean number of slots, without that of the full cache."""
    known = accuracy.filter(pl.col("policy") != FULL)
    order = (
        known.group_by("budget")
        .agg(slots=pl.col("slots_mean").fill_nan(None).mean())
        .with_columns(pl.coalesce("slots", asked_tokens()))
        .sort("slots", "budget", nulls_last=True)
    )
    return order["budget"].to_list()
