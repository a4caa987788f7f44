"""The rows of a run's policy tables, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from cfkv import store
from cfkv.analysis._carryover_stage import SHOWN
from cfkv.evaluation._names import parse_policy
from cfkv.policies._base import make_policy
from cfkv.schemas import (
    OFFLINE_ONLINE,
    POLICY_ACCURACY,
    POLICY_COMPARISONS,
    TRACES,
    VALIDITY_SUMMARY,
)

# Measures of validity on the page, with the share of tokens that is kept (None: of the score alone).
VALIDITY = {
    "rho": None,
    "auroc": None,
    "average_precision": None,
    "recall": 0.25,
    "regret": 0.25,
}
NAME = ("policy", "parameters")


def study(run: Path, kind: str) -> dict[str, Any]:
    """Everything that the page shows.

    Parameters
    ----------
    run : Path
        Run directory; without `validity_summary` the parts about validity are empty.
    kind : str
        Label kind whose validity is shown; carryover is there for all kinds.
    """
    traces = store.collect(run, TRACES).filter(pl.col("status") == "ok")
    accuracy = store.collect(run, POLICY_ACCURACY)
    return {
        "model": traces["model"][0],
        "weights": traces["weights"][0],
        "dataset": traces["dataset"][0],
        "n_traces": traces.height,
        "n_correct": int(traces["correct"].sum()),
        "kind": kind,
        "budgets": _budgets(accuracy),
        "accuracy": _accuracy(accuracy, store.collect(run, POLICY_COMPARISONS)),
        "validity": _validity(store.collect(run, VALIDITY_SUMMARY), kind),
        "carryover": _carryover(store.collect(run, OFFLINE_ONLINE)),
    }


def _budgets(accuracy: pl.DataFrame) -> list[str]:
    own = accuracy.filter(pl.col("policy") != "full").group_by("budget").agg(pl.col("slots_mean").mean())
    return own.sort("slots_mean")["budget"].to_list()


def _accuracy(accuracy: pl.DataFrame, comparisons: pl.DataFrame) -> list[dict[str, Any]]:
    """One entry per policy: per budget accuracy, interval, counts, kept tokens, and both comparisons."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in accuracy.iter_rows(named=True):
        entry = found.setdefault(
            tuple(row[name] for name in NAME),
            {**{name: row[name] for name in NAME}, "acts": _acts(row["policy"], row["parameters"])},
        )
        own = {name: _number(row[name]) for name in ("accuracy", "low", "high", "kept_mean", "kept_peak")}
        counts = {
            name: row[name] for name in ("n_graded", "n_failed", "n_unanswered", "n_capped", "eviction")
        }
        entry.setdefault("budgets", {})[row["budget"]] = {**own, **counts}
    for row in comparisons.iter_rows(named=True):
        cell = found[tuple(row[name] for name in NAME)]["budgets"][row["budget"]]
        cell[f"against_{row['against']}"] = {
            name: _number(row[name]) for name in ("difference", "low", "high", "pvalue", "adjusted_pvalue")
        }
    return list(found.values())


def _acts(policy: str, parameters: str) -> str:
    """When it evicts, in words."""
    text = f"{policy}:{parameters}" if parameters else policy
    return str(make_policy(*parse_policy(text)).schedule)


def _validity(summary: pl.DataFrame, kind: str) -> list[dict[str, Any]]:
    own = summary.filter((pl.col("kind") == kind) & (pl.col("checkpoint") == "end"))
    found: dict[str, dict[str, Any]] = {}
    for row in own.iter_rows(named=True):
        wanted = VALIDITY.get(row["measure"], ...)
        if wanted is ... or row["share"] != wanted:
            continue
        entry = found.setdefault(row["policy"], {"policy": row["policy"], "measures": {}})
        names = ("estimate", "low", "high") if row["versus"] is None else ("estimate", "adjusted_pvalue")
        key = row["measure"] if row["versus"] is None else f"{row['measure']} - {row['versus']}"
        entry["measures"][key] = {name: _number(row[name]) for name in names} | {"n_traces": row["n_traces"]}
    return list(found.values())


def _carryover(frame: pl.DataFrame) -> list[dict[str, Any]]:
    names = (
        "measure",
        "budget",
        "policies",
        "estimate",
        "low",
        "high",
        "pvalue",
        "adjusted_pvalue",
        "n_policies",
    )
    rows = frame.filter(pl.col("statistic") == "spearman")
    rows = rows.filter(pl.any_horizontal(pl.col("measure").str.ends_with(f" {name}") for name in SHOWN))
    return [{name: _number(row[name]) for name in names} for row in rows.iter_rows(named=True)]


def _number(value: Any) -> Any:
    """Four digits, None for NaN: JSON has no NaN."""
    if not isinstance(value, float):
        return value
    return None if value != value else round(value, 4)
