"""All checks of a run, and what it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from cfkv.analysis.floor import floor_facts, recorded_dtype
from cfkv.schemas import EVICTION_KL, PROBED, SIGNALS, TABLES, TOKEN_LABELS, WINDOWS
from cfkv.validate import correlations, eviction, keys, labels, signals, traces, windows
from cfkv.validate._check import Check
from cfkv.validate._content import Content, read


@dataclass(frozen=True)
class Statuses:
    """How the items of one table (and kind or group) ended: status, number, and the most frequent reason."""

    place: str
    rows: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Validation:
    """The checks of a run, its statuses, and per label kind what is known of its noise."""

    path: Path
    checks: tuple[Check, ...]
    statuses: tuple[Statuses, ...]
    floors: dict[str, list[tuple[str, str]]]

    @property
    def sound(self) -> bool:
        """Whether no check found anything."""
        return not any(check.wrong for check in self.checks)


def validate(path: Path) -> Validation:
    """Check every table of a run.

    Raises
    ------
    CfkvError
        If there is no run at `path`.
    """
    content = read(path)
    checks = [
        *content.checks,
        keys.unique_keys(content),
        keys.partitions(content),
        keys.known_traces(content),
        keys.required_values(content),
        traces.ordered_spans(content),
        traces.list_lengths(content),
    ]
    for kind in _values(content, TOKEN_LABELS.name, WINDOWS.name, EVICTION_KL.name):
        checks += _label_checks(content, kind)
    for group in _values(content, SIGNALS.name, PROBED.name):
        checks += [signals.signal_lengths(content, group), signals.probed_traces(content, group)]
    checks.append(correlations.estimates(content))
    return Validation(path, tuple(checks), tuple(_statuses(content)), _floors(content))


def _label_checks(content: Content, kind: str) -> list[Check]:
    """The checks of one label kind; a trace with a fault in its interventions is not held against its labels."""
    lists = labels.label_lists(content, kind)
    checks = [lists, labels.every_correct_trace(content, kind)]
    faulty: set[str] = set(lists.traces)
    if content.has(EVICTION_KL, kind):
        spans = eviction.removal_spans(content, kind)
        checks += [spans, eviction.mean_of_offsets(content, kind), eviction.synergies(content, kind)]
        checks.append(eviction.counted_removals(content, kind))
        faulty |= spans.traces
    else:
        inside = windows.window_spans(content, kind)
        planned = windows.planned_windows(content, kind, inside.traces)
        misplaced = inside.traces | planned.traces
        checks += [inside, planned, windows.counted_windows(content, kind, misplaced)]
        faulty |= misplaced
    checks.append(labels.recomputed_importance(content, kind, faulty))
    checks.append(labels.recomputed_value(content, kind, faulty))
    return checks


def _values(content: Content, *tables: str) -> list[str]:
    return sorted({value for name, value in content.raw if name in tables and value is not None})


def _statuses(content: Content) -> list[Statuses]:
    found = []
    for (name, value), rows in content.raw.items():
        if "status" not in rows.columns:
            continue
        place = name if value is None else f"{name}/{TABLES[name].partition}={value}"
        numbers = Counter(rows["status"].fill_null("(none)").to_list())
        lines = []
        for status, number in numbers.most_common():
            reasons = rows.filter(pl.col("status").fill_null("(none)") == status)["reason"].drop_nulls()
            common = Counter(reasons.to_list()).most_common(1)
            told = f"{common[0][0]} ({common[0][1]:,} times)" if common and common[0][0] else ""
            lines.append((status, number, told))
        found.append(Statuses(place, tuple(lines)))
    return found


def _floors(content: Content) -> dict[str, list[tuple[str, str]]]:
    made, removed = content.whole(WINDOWS), content.whole(EVICTION_KL)
    kinds = _values(content, WINDOWS.name, EVICTION_KL.name)
    facts = {
        kind: floor_facts(
            kind,
            made,
            removed,
            content.settings(kind),
            str(content.path),
            recorded_dtype(content.stages, kind),
        )
        for kind in kinds
    }
    return {kind: found for kind, found in facts.items() if found}
