"""The study as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SIGNIFICANT = 0.05


def page(content: Mapping[str, Any]) -> str:
    """Four parts: what was run, accuracy, validity, and whether one goes with the other."""
    parts = [
        f"# Policies on {content['model']} ({content['weights']}), {content['dataset']}",
        f"{content['n_traces']} traces, {content['n_correct']} correct; forced mode: the trace's own reasoning is fed "
        "through the cache under its budget and the answer is generated. A budget is a share of the tokens that follow "
        "the prompt, beside the prompt. Figures of a small model show that the instrument works; they are no findings "
        "about large reasoning models.",
        "## Accuracy at budgets",
        accuracy_table(content),
        "Brackets: 95 % intervals. `+` better or `-` worse than random at the same budget, `>` `<` than the full "
        "cache, `~` not significant (Holm over policies, paired on the same items). Failed rows are counted. "
        "Policies that act once do so at the end of the reasoning, which they saw whole: they save "
        "memory for the answer alone, and are not to be compared with those that act while it is read.",
    ]
    if content["validity"]:
        parts += [
            f"## Validity against {content['kind']} labels",
            validity_table(content["validity"]),
            "The score of each policy on the full cache before the answer, over tested tokens, mean over traces; "
            "recall and regret with 25 % of them kept. `*`: AUROC differs from random's (Holm over policies).",
        ]
    if content["carryover"]:
        parts += [
            "## Does validity carry over to accuracy?",
            carryover_table(content["carryover"], content["budgets"]),
            "Spearman over policies that are not made from labels, with 95 % bootstrap intervals over policies; `*`: "
            "adjusted p below .05 (Benjamini-Hochberg over measures and budgets). A regret should be negative.",
        ]
    return "\n\n".join(parts) + "\n"


def accuracy_table(content: Mapping[str, Any]) -> str:
    """Policies from the best to the worst over the budgets, the full cache first."""
    budgets = content["budgets"]

    def order(entry: Mapping[str, Any]) -> tuple[float, ...]:
        cells = (entry["budgets"].get(budget, {}).get("accuracy") for budget in budgets)
        return tuple(-(-1.0 if value is None else value) for value in cells)

    named = {entry["policy"]: entry for entry in content["accuracy"]}
    others = [entry for entry in content["accuracy"] if entry["policy"] != "full"]
    rows = [["full", "never", _cell(named["full"]["budgets"]["all"]), *[""] * (len(budgets) - 1)]]
    rows += [
        [_name(entry), entry["acts"], *(_cell(entry["budgets"].get(budget)) for budget in budgets)]
        for entry in sorted(others, key=lambda entry: (sum(order(entry)), entry["policy"]))
    ]
    return _table(["policy", "acts", *budgets], rows)


def _name(entry: Mapping[str, Any]) -> str:
    return f"`{entry['policy']}" + (f":{entry['parameters']}`" if entry["parameters"] else "`")


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    failed = f" ({cell['n_failed']} failed)" if cell["n_failed"] else ""
    if cell["accuracy"] is None:
        return f"–{failed}"
    marks = _mark(cell.get("against_random"), "+-") + _mark(cell.get("against_full"), "><")
    interval = f"[{cell['low']:.2f}, {cell['high']:.2f}]"
    return f"{cell['accuracy']:.2f} {interval} {marks}{failed}".strip()


def _mark(comparison: Mapping[str, Any] | None, signs: str) -> str:
    if comparison is None or comparison["adjusted_pvalue"] is None:
        return ""
    if comparison["adjusted_pvalue"] >= SIGNIFICANT:
        return "~"
    return signs[0] if comparison["difference"] > 0 else signs[1]


def validity_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Policies by AUROC."""
    measures = ("rho", "auroc", "average_precision", "recall", "regret")

    def auroc(row: Mapping[str, Any]) -> float:
        value = row["measures"].get("auroc", {}).get("estimate")
        return -1.0 if value is None else -value

    lines = []
    for row in sorted(rows, key=lambda row: (auroc(row), row["policy"])):
        versus = row["measures"].get("auroc - random", {}).get("adjusted_pvalue")
        star = "*" if versus is not None and versus < SIGNIFICANT else ""
        cells = [_figure(row["measures"].get(measure), bracket=measure == "auroc") for measure in measures]
        cells[1] += star
        lines.append([f"`{row['policy']}`", *cells])
    return _table(["policy", "rho", "AUROC", "average precision", "recall", "regret"], lines)


def _figure(cell: Mapping[str, Any] | None, *, bracket: bool) -> str:
    if cell is None or cell["estimate"] is None:
        return "–"
    text = f"{cell['estimate']:.2f}"
    if bracket and cell["low"] is not None:
        text += f" [{cell['low']:.2f}, {cell['high']:.2f}]"
    return text


def carryover_table(rows: Sequence[Mapping[str, Any]], budgets: Sequence[str]) -> str:
    """Measures down, budgets across."""
    own = [row for row in rows if row["policies"] == "without_excluded"]
    found = {(row["measure"], row["budget"]): row for row in own}
    measures = list(dict.fromkeys(row["measure"] for row in own))
    lines = [
        [measure, *(_correlation(found.get((measure, budget))) for budget in budgets)] for measure in measures
    ]
    return _table(["offline measure", *budgets], lines)


def _correlation(row: Mapping[str, Any] | None) -> str:
    if row is None or row["estimate"] is None:
        return "–"
    adjusted = row["adjusted_pvalue"]
    star = "*" if adjusted is not None and adjusted < SIGNIFICANT else ""
    text = f"{row['estimate']:+.2f}{star} [{row['low']:+.2f}, {row['high']:+.2f}], n = {row['n_policies']}"
    return text


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
