"""The table that the command line prints: accuracy by policy and budget, with what differs significantly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from cfkv.analysis._arms import ARM, FULL, NAME, budgets_in_order, policy_name
from cfkv.analysis.compare import RANDOM, SIGNIFICANCE

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

BUDGETS_PER_TABLE = 6
NAME_WIDTH = 30
# Two characters behind an accuracy: against random, against full.
MARKS = {"better": ("+", ">"), "worse": ("-", "<"), "not significant": ("~", "~"), "no test": (" ", " ")}


def outcome(comparison: Mapping[str, Any] | None) -> str:
    """One row of `policy_comparisons` in words: better, worse, not significant (adjusted p from .05), or no test."""
    adjusted = None if comparison is None else comparison["adjusted_pvalue"]
    if comparison is None or adjusted is None or math.isnan(adjusted):
        return "no test"
    if adjusted >= SIGNIFICANCE:
        return "not significant"
    return "better" if comparison["difference"] > 0 else "worse"


def by_arm(comparisons: pl.DataFrame) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows by (mode, policy, parameters, positions, budget, against)."""
    key = (*ARM, "against")
    return {tuple(row[name] for name in key): row for row in comparisons.iter_rows(named=True)}


def by_policy(rows: pl.DataFrame) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows of `policy_accuracy` of one mode by (policy, parameters, positions, budget)."""
    return {tuple(row[name] for name in (*NAME, "budget")): row for row in rows.iter_rows(named=True)}


def policies_in_order(accuracy: pl.DataFrame, mode: str) -> list[tuple[str, str, str]]:
    """(policy, parameters, positions) of a mode without `full`: best at the smallest budget first, then at the next."""
    rows = accuracy.filter((pl.col("mode") == mode) & (pl.col("policy") != FULL))
    budgets = budgets_in_order(rows)
    found = {
        name: -1.0 if row["accuracy"] is None or math.isnan(row["accuracy"]) else row["accuracy"]
        for name, row in by_policy(rows).items()
    }
    names = set(rows.select(NAME).iter_rows())
    return sorted(names, key=lambda name: (*(-found.get((*name, budget), -1.0) for budget in budgets), name))


def accuracy_table(accuracy: pl.DataFrame, comparisons: pl.DataFrame) -> Group:
    """Accuracy by policy and budget, one table per mode, best at the smallest budget first.

    Parameters
    ----------
    accuracy, comparisons : DataFrame
        The tables `policy_accuracy` and `policy_comparisons` of the same evaluations.

    Returns
    -------
    rich.console.Group
        Tables that fit 100 columns; more than 6 budgets are continued below. Two marks behind a number say what is
        significant after adjustment, better or worse than random and than the full cache, and what is not: the
        caption explains them. A dash: no graded row.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    known = by_arm(comparisons)
    for mode in accuracy["mode"].unique().sort():
        rows = accuracy.filter(pl.col("mode") == mode)
        budgets = budgets_in_order(rows)
        # A title or caption of a rich table is as narrow as the table.
        parts.append(Text(f"Accuracy by policy and budget, mode {mode}", style="bold"))
        for at in range(0, len(budgets), BUDGETS_PER_TABLE):
            parts.append(_block(rows, known, mode, budgets[at : at + BUDGETS_PER_TABLE]))
        tests = comparisons.filter(pl.col("mode") == mode)
        parts.append(Text(_caption(rows, tests) + "\n", style="dim"))
    return Group(*parts)


def _block(
    rows: pl.DataFrame,
    known: Mapping[tuple[str, ...], Mapping[str, Any]],
    mode: str,
    budgets: list[str],
) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("policy", overflow="fold", max_width=NAME_WIDTH)
    for budget in budgets:
        table.add_column(budget, justify="right", no_wrap=True, min_width=6)
    found = by_policy(rows)
    for name in policies_in_order(rows, mode):
        cells = []
        for budget in budgets:
            row = found.get((*name, budget))
            marks = (outcome(known.get((mode, *name, budget, against))) for against in (RANDOM, FULL))
            shown = "".join(MARKS[word][side] for side, word in enumerate(marks))
            cells.append(f"{_share(row)} {shown}")
        table.add_row(escape(policy_name(*name)), *cells)
    return table


def _caption(rows: pl.DataFrame, tests: pl.DataFrame) -> str:
    """What the marks mean, and how many items stand behind the numbers of one mode."""
    sentences = []
    full = rows.filter(pl.col("policy") == FULL)
    if full.height:
        row = full.row(0, named=True)
        interval = "" if math.isnan(row["low"]) else f" [{_plain(row['low'])}, {_plain(row['high'])}]"
        sentences.append(f"Full cache: {_share(row).strip()}{interval} of {row['n_graded']:,} rows.")
    arms = rows.filter(pl.col("policy") != FULL)
    sentences.append(f"Graded rows per arm: {_span(arms['n_graded'])}; failed: {_span(arms['n_failed'])}.")
    sentences.append(
        "First mark, against random at the same budget: + better, - worse; second, against the full cache: > better, "
        "< worse; ~ not significant (adjusted p from .05), blank: no test."
    )
    corrections = " and ".join(
        sorted(name.replace("_", "-").title() for name in tests["correction"].unique())
    )
    if corrections:
        sentences.append(f"Adjusted ({corrections}) over the policies of a budget, on shared items alone.")
    return " ".join(sentences)


def _share(row: Mapping[str, Any] | None) -> str:
    if row is None or row["accuracy"] is None or math.isnan(row["accuracy"]):
        return "-"
    return _plain(row["accuracy"])


def _plain(value: float) -> str:
    """`.62`, `1.00`: two decimals without the leading zero."""
    text = f"{value:.2f}"
    return text[1:] if text.startswith("0") else text


def _span(values: Iterable[int]) -> str:
    found = list(values)
    if not found:
        return "0"
    low, high = min(found), max(found)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
