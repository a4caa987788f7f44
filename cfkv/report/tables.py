"""The correlation table: one row per signal, layer and smoothing, the measures side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from cfkv.report.text import MEASURES, known, layer_name, number, pvalue, significant, span

TOP_ROWS = 3
_KEY = ["signal", "layer", "smoothing", "control"]


@dataclass(frozen=True)
class Cell:
    """One estimate as text; `verdict` is its adjusted p, or why there is none."""

    estimate: str
    interval: str
    verdict: str
    strong: bool


@dataclass(frozen=True)
class Row:
    """One signal, layer and smoothing; `cells` in the order of MEASURES (None: not measured)."""

    signal: str
    layer: str
    smoothing: str
    cells: tuple[Cell | None, ...]
    n_traces: str
    n_tokens: str


def _cell(row: dict[str, Any] | None) -> Cell | None:
    if row is None:
        return None
    if not known(row["estimate"]):
        return Cell("–", "", row["nan_reason"] or "no reason recorded", strong=False)
    interval = f"[{number(row['low'])}, {number(row['high'])}]"
    if not (known(row["low"]) and known(row["high"])):
        interval = "no interval"
    if not known(row["adjusted_pvalue"]):
        verdict = "no test"
    elif significant(row["adjusted_pvalue"]):
        verdict = f"p {pvalue(row['adjusted_pvalue'])}"
    else:
        verdict = f"not significant, p {pvalue(row['adjusted_pvalue'])}"
    if row["nan_reason"]:
        verdict += f"; {row['nan_reason']}"
    return Cell(number(row["estimate"]), interval, verdict, strong=significant(row["adjusted_pvalue"]))


def correlation_table(correlations: pl.DataFrame, kind: str, *, top: int | None = None) -> list[Row]:
    """Rows for one label kind, in table order.

    With `top`, only that many rows of each signal: those with the largest |estimate| of within-trace rho,
    significant ones before the others.
    """
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in correlations.filter(pl.col("kind") == kind).iter_rows(named=True):
        found.setdefault(tuple(row[name] for name in _KEY), {})[row["measure"]] = row
    by_signal: dict[str, list[tuple[bool, float, Row]]] = {}
    for (signal, layer, smoothing, control), measures in found.items():
        within = measures.get("spearman_within", {"estimate": None, "adjusted_pvalue": None})
        strength = abs(within["estimate"]) if known(within["estimate"]) else -1.0
        made = Row(
            signal=signal,
            layer=layer_name(layer),
            smoothing=smoothing if control in (None, "none") else f"{smoothing} | {control}",
            cells=tuple(_cell(measures.get(measure)) for measure in MEASURES),
            n_traces=span(row["n_traces"] for row in measures.values()),
            n_tokens=span(row["n_tokens"] for row in measures.values()),
        )
        by_signal.setdefault(signal, []).append((significant(within["adjusted_pvalue"]), strength, made))
    rows: list[Row] = []
    for ranked in by_signal.values():
        if top is not None:
            ranked = sorted(ranked, key=lambda entry: entry[:2], reverse=True)
            # A signal without any estimate has one row, for its reason.
            ranked = [entry for entry in ranked if entry[1] >= 0][:top] or ranked[:1]
        rows += [row for _, _, row in ranked]
    return rows


def significance_sentence(correlations: pl.DataFrame, kind: str) -> list[str]:
    """One clause per measure: how many of its tests have an adjusted p below 5 %."""
    clauses = []
    for measure, name in MEASURES.items():
        rows = correlations.filter(pl.col("kind") == kind, pl.col("measure") == measure)
        tested = rows["adjusted_pvalue"].fill_nan(None).drop_nulls()
        below = sum(significant(value) for value in tested)
        if len(rows):
            clauses.append(f"{name}: {below} of {len(tested)} tests")
    return clauses
