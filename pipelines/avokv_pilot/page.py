"""The pilot as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.avokv_pilot.pilot import DEFAULT, RANDOM, shown, significant

HEAD = """# AvoKV-E's payload weight and delay, chosen on a pilot

Written by `{command}`: do not edit.

Chosen on the traces of `{pilot}`, judged on other problems, those of `{test}`; evictions every {every} tokens. Right
answers of all rows of correct traces, a failed row being none. Intervals: 95 %, of the graded rows. p: paired on the
rows that both answered, Holm over the policies of a table; n.s.: not significant, adjusted p from .05.
"""


def page(content: Mapping[str, Any]) -> str:
    """The whole Markdown file."""
    parts = [HEAD.format_map(content)]
    for each in content["budgets"]:
        parts.append(f"## Budget {each['budget']}\n")
        parts.append(_grid(each["settings"], each["pick"]))
        chosen = each["pick"]
        parts.append(
            f"\nPicked: weight {chosen['weight']:g}, delay {chosen['delay']}. The default has "
            f"{each['default']['right']} of {each['default']['rows']}. {' '.join(each['remarks'])}".rstrip()
            + "\n"
        )
        parts.append(_test(each["test"]))
    return "\n".join(parts).rstrip() + "\n"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _grid(settings: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> str:
    delays = sorted({each["delay"] for each in settings})
    lines = []
    for weight in sorted({each["weight"] for each in settings}):
        cells = [f"{weight:g}"]
        for each in (each for each in settings if each["weight"] == weight):
            here = (each["weight"], each["delay"]) == (chosen["weight"], chosen["delay"])
            cells.append(f"**{each['right']}**" if here else str(each["right"]))
        lines.append(cells)
    rows = settings[0]["rows"]
    return f"Right answers of {rows}:\n\n" + _table(
        ["weight", *(f"delay {delay}" for delay in delays)], lines
    )


def _test(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        interval = "" if row["low"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]"
        accuracy = "none" if row["accuracy"] is None else f"{row['accuracy']:.3f}{interval}"
        called = row["called"] if row["called"] == row["policy"] else f"{row['called']}: `{row['policy']}`"
        differences = [_said(row[f"against_{name}"]) for name in (RANDOM, DEFAULT)]
        lines.append([called, f"{row['right']} of {row['rows']}", accuracy, str(row["failed"]), *differences])
    head = ["on the test run", "right", "accuracy", "failed", "less random", "less the default"]
    return _table(head, lines)


def _said(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return ""
    worse = difference["difference"] < 0 and (difference["adjusted_pvalue"] or 1) < 0.05
    return shown(difference) + ("" if significant(difference) or worse else ", n.s.")
