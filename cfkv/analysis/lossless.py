"""Per trace, the smallest budget at which a policy keeps the answer; and what a policy needs over traces."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl

from cfkv.analysis import _arms
from cfkv.analysis._arms import FULL
from cfkv.errors import CfkvError
from cfkv.schemas import LOSSLESS_BUDGETS

GROUP = ("mode", *_arms.NAME)
# Of traces that the question is not asked of.
NOT_ASKED = ("full is wrong", "no verdict of full", "no budget with a verdict")


def lossless_budgets(evaluations: pl.DataFrame, *, need_full: bool = True) -> pl.DataFrame:
    """The smallest budget of the grid at which a trace keeps its answer, per policy and mode.

    Parameters
    ----------
    evaluations : DataFrame
        The table of that name.
    need_full : bool
        Ask only of traces that the arm `full` of the same mode answers right. Without it, of all traces.

    Returns
    -------
    DataFrame
        The table `lossless_budgets`, sorted by its key: one row per trace, policy (with parameters and positions) and
        mode. The answer is *kept* if it is graded correct; with several samples, if it is correct at least as often
        as with the full cache (without `need_full`: every time). Budgets are compared in slots, within the trace;
        those of equal slots are one budget. **The headline is `slots`**, the smallest budget from which on the answer
        is kept: at it and at every larger one of the grid. Outcomes are not monotone: a small cache can answer right
        by luck or by another route, and fail with more. `any_slots`, the plain smallest budget, is a minimum over
        noisy outcomes: it falls with every budget added to the grid, and more for policies that are erratic. It is
        kept to show how far the two lie apart (`monotone` says whether they agree). `slots` is null with a reason
        when the answer is lost, or unknown, at the largest budget, or when the trace was not asked of. A failed row
        at a budget ends the run of kept ones from above: `slots` is then an upper bound, and `n_unknown` above 0.

    Raises
    ------
    CfkvError
        If a trace has two rows of one arm and sample.

    References
    ----------
    PAGE's b*(x) is the plain minimum, which it calls an oracle; methods.md 6.
    """
    scored = _arms.items(_arms.prepared(evaluations))
    full = {
        (mode, trace_id): score
        for mode, trace_id, score in scored.filter(pl.col("policy") == FULL)
        .select("mode", "trace_id", "score")
        .iter_rows()
    }
    grid = _grid(scored)
    found = []
    for group, rows in grid.group_by(*GROUP, "trace_id", maintain_order=True):
        mode, trace_id = group[0], group[-1]
        reference = full.get((mode, trace_id)) if need_full else 1.0
        outcomes = _outcomes(rows, reference)
        made = {
            **dict(zip((*GROUP, "trace_id"), group, strict=True)),
            "problem_id": rows["problem_id"][0],
            "n_budgets": sum(kept is not None for _, _, kept in outcomes),
            "n_unknown": sum(kept is None for _, _, kept in outcomes),
        }
        if reference is None:
            made["reason"] = "no verdict of full"
        elif reference == 0:
            made["reason"] = "full is wrong"
        elif not made["n_budgets"]:
            made["reason"] = "no budget with a verdict"
        else:
            made |= _smallest(outcomes)
        found.append(made)
    return _arms.as_table(LOSSLESS_BUDGETS, found)


def _grid(scored: pl.DataFrame) -> pl.DataFrame:
    """The items of the policies, each with a number of slots.

    A failed row may not know its slots, yet must not leave the grid: larger budgets being kept would then be claimed
    of one that nobody saw. It gets those of the same trace and budget under another policy, else of the budget as
    asked, else of other traces, else a place above all others. Only its place counts.
    """
    place = pl.coalesce(
        "slots",
        pl.col("slots").max().over("mode", "trace_id", "budget"),
        _arms.asked_tokens(),
        pl.col("slots").mean().over("mode", "budget"),
        pl.lit(float(2**31 - 1)),
    )
    grid = scored.filter(pl.col("policy") != FULL).with_columns(
        pl.when(~pl.col("complete")).then(place).otherwise("slots").alias("slots")
    )
    return grid.filter(pl.col("slots").is_not_null()).with_columns(pl.col("slots").cast(pl.Int64))


Outcome = tuple[int, str, bool | None]


def _outcomes(rows: pl.DataFrame, reference: float | None) -> list[Outcome]:
    """(slots, budget as asked, kept) from the smallest to the largest budget; kept is None where unknown."""
    found: dict[int, tuple[str, list[bool | None]]] = {}
    for slots, budget, score in rows.sort("slots", "budget").select("slots", "budget", "score").iter_rows():
        kept = None if score is None or reference is None else score >= reference - 1e-9
        found.setdefault(slots, (budget, []))[1].append(kept)
    merged: list[Outcome] = []
    for slots, (budget, kepts) in found.items():
        known = [kept for kept in kepts if kept is not None]
        merged.append((slots, budget, all(known) if known else None))
    return merged


def _smallest(outcomes: list[Outcome]) -> dict[str, Any]:
    """The two smallest budgets of one trace."""
    made: dict[str, Any] = {}
    known = [outcome for outcome in outcomes if outcome[2] is not None]
    for slots, budget, kept in reversed(outcomes):
        if not kept:
            break
        made |= {"slots": slots, "budget": budget}
    least = next((outcome for outcome in known if outcome[2]), None)
    if least is not None:
        made |= {"any_slots": least[0], "any_budget": least[1]}
    kepts = [kept for _, _, kept in known]
    made["monotone"] = kepts == sorted(kepts, key=bool)
    if "slots" not in made:
        _, budget, kept = outcomes[-1]
        made["reason"] = f"{'unknown' if kept is None else 'lost'} at the largest budget, {budget}"
    return made


def lossless_summary(
    lossless: pl.DataFrame,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
    *,
    oracle: str = "oracle",
) -> pl.DataFrame:
    """What each policy needs to keep answers, over traces.

    Parameters
    ----------
    lossless : DataFrame
        The table `lossless_budgets`.
    level, draws, seed :
        Of the interval of the share: Wilson's, or the bootstrap over problems where one has several traces.
    oracle : str
        The policy that the others are held against.

    Returns
    -------
    DataFrame
        One row per mode, policy, parameters and positions: `n_traces` that were asked of; `n_found` with a headline
        budget, and their `share` with `low`, `high`; `median_slots`, in which a trace without a budget counts as
        above the grid (leaving it out would reward whoever fails on the hard ones), NaN where that is the median;
        `median_any_slots` likewise; `n_not_monotone`; and `ratio_to_oracle`, the median over the `n_ratio` traces
        with a budget under both of slots / the oracle's slots, above 1 = needs more; NaN without such a trace.

    Raises
    ------
    CfkvError
        If the oracle has several settings of parameters at one mode and positions, none of them its default.
    """
    schema: dict[str, Any] = {
        **dict.fromkeys(GROUP, pl.String),
        **dict.fromkeys(("n_traces", "n_found"), pl.Int64),
        **dict.fromkeys(("share", "low", "high", "median_slots", "median_any_slots"), pl.Float64),
        **{"n_not_monotone": pl.Int64, "ratio_to_oracle": pl.Float64, "n_ratio": pl.Int64},
    }
    asked = lossless.filter(~pl.col("reason").is_in(NOT_ASKED).fill_null(value=False))
    found = []
    for group, rows in asked.group_by(*GROUP, maintain_order=True):
        with_budget = rows.with_columns(found=pl.col("slots").is_not_null().cast(pl.Float64))
        share, _ = _arms.share_estimate(*_arms.per_problem(with_budget, "found"), level, draws, seed)
        ideal = _oracle_slots(asked, str(group[0]), str(group[-1]), oracle)
        ratios = [
            slots / ideal[trace_id]
            for trace_id, slots in rows.select("trace_id", "slots").drop_nulls().iter_rows()
            if trace_id in ideal
        ]
        found.append(
            {
                **dict(zip(GROUP, group, strict=True)),
                "n_traces": rows.height,
                "n_found": int(with_budget["found"].sum()),
                "share": share.estimate,
                "low": share.low,
                "high": share.high,
                "median_slots": _median(rows["slots"]),
                "median_any_slots": _median(rows["any_slots"]),
                "n_not_monotone": int((~rows["monotone"]).sum()),
                "ratio_to_oracle": float(np.median(ratios)) if ratios else math.nan,
                "n_ratio": len(ratios),
            }
        )
    return pl.DataFrame(found, schema=schema).sort(GROUP)


def _oracle_slots(asked: pl.DataFrame, mode: str, positions: str, oracle: str) -> dict[str, int]:
    rows = asked.filter(
        (pl.col("mode") == mode) & (pl.col("positions") == positions) & (pl.col("policy") == oracle)
    )
    settings = rows["parameters"].unique().to_list()
    if "" in settings:
        rows = rows.filter(pl.col("parameters") == "")
    elif len(settings) > 1:
        raise CfkvError(
            f"{oracle!r} has the parameters {', '.join(map(repr, sorted(settings)))} in mode {mode!r}; a ratio needs "
            "one: filter the table"
        )
    return dict(rows.select("trace_id", "slots").drop_nulls().iter_rows())


def _median(slots: pl.Series) -> float:
    """Median with null as above the grid; NaN where that is the median."""
    middle = float(np.median(slots.cast(pl.Float64).fill_null(math.inf).to_numpy()))
    return middle if math.isfinite(middle) else math.nan
