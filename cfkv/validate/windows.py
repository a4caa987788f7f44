"""Checks of the windows table: where the windows lie, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import polars as pl

from cfkv.schemas import TOKEN_LABELS, WINDOWS
from cfkv.validate._check import Check
from cfkv.validate._content import Content


def window_spans(content: Content, kind: str) -> Check:
    """Windows are not empty and lie inside the reasoning of their trace."""
    check = Check(f"windows/kind={kind}", "windows lie inside the reasoning")
    for row in content.frame(WINDOWS, kind).drop_nulls(("start", "stop")).to_dicts():
        trace = content.lengths.get(row["trace_id"])
        if trace is None:
            continue
        check.seen += 1
        low, high = trace["reasoning_start"], trace["reasoning_stop"]
        if not low <= row["start"] < row["stop"] <= high:
            where = f"trace {row['trace_id']}, window {row['window_index']}"
            seen = f"[{row['start']}, {row['stop']})"
            check.fail(where, seen, f"a part of the reasoning [{low}, {high})", row["trace_id"])
    return check


def planned_windows(content: Content, kind: str, skip: Set[str]) -> Check:
    """Each labelled trace has the windows that the recorded size and stride plan (methods.md 5.1), in this order."""
    check = Check(f"windows/kind={kind}", "each trace has the windows that size and stride plan")
    settings = content.settings(kind)
    size, stride = settings.get("window"), settings.get("stride")
    if not isinstance(size, int) or not isinstance(stride, int) or min(size, stride) < 1:
        return check
    for trace_id, spans in _spans_by_trace(content, kind).items():
        trace = content.lengths.get(trace_id)
        if trace is None or trace_id in skip:
            continue
        check.seen += 1
        wanted = planned(trace["reasoning_start"], trace["reasoning_stop"], size, stride)
        if spans == wanted:
            continue
        where = f"trace {trace_id}"
        if len(spans) != len(wanted):
            check.fail(where, f"{len(spans)} windows", f"{len(wanted)}, of {size} every {stride}", trace_id)
        else:
            index = next(i for i, pair in enumerate(zip(spans, wanted, strict=True)) if pair[0] != pair[1])
            seen, due = (f"[{start}, {stop})" for start, stop in (spans[index], wanted[index]))
            check.fail(f"{where}, window {index}", seen, due, trace_id)
    return check


def counted_windows(content: Content, kind: str, skip: Set[str]) -> Check:
    """n_windows and n_flipped of token_labels are the numbers of the windows table."""
    check = Check(f"token_labels/kind={kind}", "n_windows and n_flipped are those of the windows")
    rows = content.frame(WINDOWS, kind)
    made = {
        trace_id: (number, flipped)
        for trace_id, number, flipped in rows.group_by("trace_id")
        .agg(number=pl.len(), flipped=pl.col("flipped").sum())
        .iter_rows()
    }
    if (WINDOWS.name, kind) in content.incomplete:
        return check
    for label in content.frame(TOKEN_LABELS, kind).to_dicts():
        trace_id = label["trace_id"]
        found = made.pop(trace_id, (0, 0))
        if trace_id in skip:
            continue
        check.seen += 1
        told = (label["n_windows"] or 0, label["n_flipped"] or 0)
        if told != found:
            seen = f"n_windows {told[0]}, n_flipped {told[1]}"
            check.fail(f"trace {trace_id}", seen, f"{found[0]} and {found[1]}", trace_id)
    if (TOKEN_LABELS.name, kind) not in content.incomplete:
        for trace_id, (number, _) in made.items():
            if trace_id not in skip:
                check.fail(f"trace {trace_id}", f"{number} windows and no row of labels", "a row", trace_id)
    return check


def planned(start: int, stop: int, size: int, stride: int) -> list[tuple[int, int]]:
    """Windows over [start, stop): ceil(max(N - size, 0) / stride) + 1 of them, the last clipped to `stop`.

    Written down here once more, so that the check does not believe the code that it checks. A stride above the size
    leaves gaps, and no window begins after the span.
    """
    length = stop - start
    number = -(-max(length - size, 0) // stride) + 1 if length > 0 else 0
    spans = [(start + index * stride, min(start + index * stride + size, stop)) for index in range(number)]
    return [span for span in spans if span[0] < span[1]]


def _spans_by_trace(content: Content, kind: str) -> Mapping[str, list[tuple[int, int]]]:
    """Windows of the labelled traces in the order of their index; a labelled trace without any has none."""
    labelled = content.frame(TOKEN_LABELS, kind).filter(pl.col("status") == "labelled")["trace_id"]
    found: dict[str, list[tuple[int, int]]] = {}
    if (WINDOWS.name, kind) not in content.incomplete:
        found = {trace_id: [] for trace_id in labelled}
    rows: list[dict[str, Any]] = content.frame(WINDOWS, kind).sort("trace_id", "window_index").to_dicts()
    for row in rows:
        if row["trace_id"] in found or (WINDOWS.name, kind) in content.incomplete:
            found.setdefault(row["trace_id"], []).append((row["start"], row["stop"]))
    return found
