"""The section "Policies at real budgets": what the evaluations say, made ready to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from cfkv.analysis._arms import FULL, NAME, budgets_in_order, policy_name
from cfkv.analysis.compare import RANDOM, policy_accuracy, policy_comparisons
from cfkv.analysis.lossless import lossless_budgets, lossless_summary
from cfkv.analysis.policy_table import by_arm, by_policy, outcome, policies_in_order
from cfkv.report.tables import Cell
from cfkv.report.text import count, known, number, percent, pvalue, slug, span


@dataclass(frozen=True)
class PolicyResults:
    """The evaluations of a run with the statistics over them; `lossless` is the summary per policy."""

    evaluations: pl.DataFrame
    accuracy: pl.DataFrame
    comparisons: pl.DataFrame
    lossless: pl.DataFrame


def policy_results(evaluations: pl.DataFrame) -> PolicyResults | None:
    """All statistics over the table `evaluations`, or None if it has no rows."""
    if not evaluations.height:
        return None
    return PolicyResults(
        evaluations=evaluations,
        accuracy=policy_accuracy(evaluations),
        comparisons=policy_comparisons(evaluations),
        lossless=lossless_summary(lossless_budgets(evaluations)),
    )


def policy_sections(results: PolicyResults, plots: Mapping[str, str]) -> list[dict[str, Any]]:
    """One entry per mode, in the order of their names: figure, table, costs, lossless budgets."""
    tests = by_arm(results.comparisons)
    sections = []
    for mode in results.accuracy["mode"].unique().sort():
        rows = results.accuracy.filter(pl.col("mode") == mode)
        compared = results.comparisons.filter(pl.col("mode") == mode)
        budgets = budgets_in_order(rows)
        found = by_policy(rows)
        order = policies_in_order(rows, mode)
        full = [_full_sentence(row) for row in rows.filter(pl.col("policy") == FULL).iter_rows(named=True)]
        sections.append(
            {
                "mode": mode,
                "id": slug(mode),
                "plot": plots.get(f"accuracy-{slug(mode)}"),
                "full": full[0] if full else "The full cache was not evaluated.",
                "tests": _test_sentences(compared),
                "budgets": budgets,
                "rows": [
                    (policy_name(*name), [_cell(found, tests, mode, name, budget) for budget in budgets])
                    for name in order
                ],
                "arms": _arm_rows(
                    found, [*_full_names(rows), *order], list(dict.fromkeys(["all", *budgets]))
                ),
                "lossless": _lossless_rows(results.lossless.filter(pl.col("mode") == mode), order),
                "level": f"{100 * rows['level'][0]:.0f} %",
            }
        )
    return sections


def _full_names(rows: pl.DataFrame) -> list[tuple[str, ...]]:
    return list(rows.filter(pl.col("policy") == FULL).select(NAME).unique().sort(NAME).iter_rows())


def _full_sentence(row: Mapping[str, Any]) -> str:
    if not known(row["accuracy"]):
        return f"The full cache has no accuracy: {row['nan_reason']}."
    interval = f" [{number(row['low'])}, {number(row['high'])}]" if known(row["low"]) else " (no interval)"
    return (
        f"With the full cache {number(row['accuracy'])}{interval} of {count(row['n_graded'])} answers to "
        f"{count(row['n_problems'])} problems are correct."
    )


def _test_sentences(compared: pl.DataFrame) -> list[str]:
    """How many tests of each baseline came out how; one clause per baseline."""
    clauses = []
    for baseline in (RANDOM, FULL):
        words = [outcome(row) for row in compared.filter(pl.col("against") == baseline).iter_rows(named=True)]
        made = len(words) - words.count("no test")
        if made:
            clauses.append(
                f"against {baseline} {words.count('better')} better, {words.count('worse')} worse and "
                f"{words.count('not significant')} not significant of {made} tests"
            )
    return clauses


def _cell(
    found: Mapping[tuple[str, ...], Mapping[str, Any]],
    tests: Mapping[tuple[str, ...], Mapping[str, Any]],
    mode: str,
    name: tuple[str, str, str],
    budget: str,
) -> Cell | None:
    row = found.get((*name, budget))
    if row is None:
        return None
    if not known(row["accuracy"]):
        return Cell("–", "", row["nan_reason"] or "no reason recorded", strong=False)
    interval = f"[{number(row['low'], 2)}, {number(row['high'], 2)}]" if known(row["low"]) else "no interval"
    told = []
    strong = False
    for baseline in (RANDOM, FULL):
        test = tests.get((mode, *name, budget, baseline))
        word = outcome(test)
        if test is not None and word != "no test":
            told.append(f"{baseline}: {word}, p {pvalue(test['adjusted_pvalue'])}")
        strong |= baseline == RANDOM and word == "better"
    return Cell(number(row["accuracy"], 2), interval, "\n".join(told) or "no test", strong=strong)


def _arm_rows(
    found: Mapping[tuple[str, ...], Mapping[str, Any]],
    order: Sequence[tuple[str, ...]],
    budgets: Sequence[str],
) -> list[list[str]]:
    """Counts, caps, memory and time of every arm, as text."""
    lines = []
    for name in order:
        for budget in budgets:
            row = found.get((*name, budget))
            if row is None:
                continue
            completed = f"{number(row['accuracy_completed'], 2)} of {count(row['n_completed'])}"
            seconds, size = row["seconds_per_token"], row["peak_bytes"]
            lines.append(
                [
                    policy_name(*name),
                    budget,
                    number(row["slots_mean"], 0),
                    row["eviction"] or "–",
                    count(row["n_graded"]),
                    count(row["n_failed"] + row["n_ungraded"]),
                    completed if row["n_completed"] else "–",
                    percent(row["n_capped"], row["n_ran"]),
                    percent(row["n_unanswered"], row["n_ran"]),
                    number(row["kept_mean"], 0),
                    number(row["kept_peak"], 0),
                    number(row["evicted"], 0),
                    number(1000 * seconds, 1) if known(seconds) else "–",
                    number(size / 2**20, 2) if size is not None else "–",
                ]
            )
    return lines


def _lossless_rows(summary: pl.DataFrame, order: Sequence[tuple[str, ...]]) -> list[list[str]]:
    found = {tuple(row[part] for part in NAME): row for row in summary.iter_rows(named=True)}
    lines = []
    for name in order:
        row = found.get(name)
        if row is None:
            continue
        ratio = f"{number(row['ratio_to_oracle'], 2)} over {count(row['n_ratio'])}" if row["n_ratio"] else "–"
        above = "above the grid"
        lines.append(
            [
                policy_name(*name),
                f"{count(row['n_found'])} of {count(row['n_traces'])}",
                number(row["median_slots"], 0) if known(row["median_slots"]) else above,
                number(row["median_any_slots"], 0) if known(row["median_any_slots"]) else above,
                ratio,
                count(row["n_not_monotone"]),
            ]
        )
    return lines


def arms_in_words(results: PolicyResults) -> str:
    """How much was evaluated: `12 arms of 6 policies, 100 traces`."""
    arms = results.accuracy
    policies = arms.filter(pl.col("policy") != FULL)["policy"].n_unique()
    return (
        f"{count(arms.height)} arms, {count(policies)} {'policy' if policies == 1 else 'policies'}, "
        f"{span(arms['n_items'])} graded traces an arm"
    )
