"""Checks of token_labels: recomputed from the interventions, and one row per trace that was to be labelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cfkv.schemas import EVICTION_KL, TOKEN_LABELS, TRACES, WINDOWS
from cfkv.validate._check import Check
from cfkv.validate._content import Content
from cfkv.validate.eviction import TOLERANCE, blocks_of

Spans = Sequence[tuple[int, int]]


def label_lists(content: Content, kind: str) -> Check:
    """Importance and value have one entry per token, and say nothing outside the reasoning."""
    check = Check(
        f"token_labels/kind={kind}", "lists have one entry per token, and are silent outside the reasoning"
    )
    for label, trace in _labelled(content, kind, frozenset()):
        check.seen += 1
        where, trace_id = f"trace {label['trace_id']}", label["trace_id"]
        importance, value = _numbers(label["importance"]), _numbers(label["value"])
        if (importance.size, value.size) != (trace["length"], trace["length"]):
            seen = f"{importance.size} importances, {value.size} values"
            check.fail(where, seen, f"{trace['length']} tokens", trace_id)
            continue
        outside = np.ones(trace["length"], dtype=bool)
        outside[trace["reasoning_start"] : trace["reasoning_stop"]] = False
        odd = np.flatnonzero(~np.isin(importance, (-1, 0, 1)) | (outside & (importance != -1)))
        loud = np.flatnonzero(outside & ~np.isnan(value))
        if odd.size:
            expected = "-1 outside the reasoning" if outside[odd[0]] else "-1, 0 or 1"
            check.fail(f"{where}, token {odd[0]}", f"importance {importance[odd[0]]:g}", expected, trace_id)
        elif loud.size:
            seen, expected = f"value {value[loud[0]]:g}", "NaN outside the reasoning"
            check.fail(f"{where}, token {loud[0]}", seen, expected, trace_id)
    return check


def recomputed_importance(content: Content, kind: str, skip: Set[str]) -> Check:
    """Importance is OR over the covering windows; kinds without windows test no token."""
    check = Check(f"token_labels/kind={kind}", "importance is OR over the covering windows")
    rows = _window_rows(content, kind)
    removals = content.has(EVICTION_KL, kind)
    if (WINDOWS.name, kind) in content.incomplete:
        return check
    for label, trace in _labelled(content, kind, skip):
        check.seen += 1
        wanted = np.full(trace["length"], -1.0)
        for row in () if removals else rows.get(label["trace_id"], ()):
            span = slice(row["start"], row["stop"])
            wanted[span] = np.maximum(wanted[span], float(bool(row["flipped"])))
        found = _numbers(label["importance"])
        different = np.flatnonzero(found != wanted)
        if different.size:
            at = different[0]
            where = f"trace {label['trace_id']}, token {at} ({different.size} tokens differ)"
            check.fail(where, f"importance {found[at]:g}", f"{wanted[at]:g}", label["trace_id"])
    return check


def recomputed_value(content: Content, kind: str, skip: Set[str]) -> Check:
    """A token's value is the mean over the covering windows, or over the removals of a single block over it."""
    check = Check(
        f"token_labels/kind={kind}", "value is the mean over the covering windows or single removals"
    )
    if {(WINDOWS.name, kind), (EVICTION_KL.name, kind)} & content.incomplete:
        return check
    held = _interventions(content, kind)
    for label, trace in _labelled(content, kind, skip):
        check.seen += 1
        spans, values = held.get(label["trace_id"], ([], []))
        wanted, found = _mean(trace["length"], spans, values), _numbers(label["value"])
        # Rows hold float32, the mean was taken before rounding: the error scales with the largest of them.
        scale = max([1.0, *(abs(value) for value in values if np.isfinite(value))])
        with np.errstate(invalid="ignore"):
            equal = (found == wanted) | (np.abs(found - wanted) <= TOLERANCE * scale)
        different = np.flatnonzero(~(equal | (np.isnan(found) & np.isnan(wanted))))
        if different.size:
            at = different[0]
            where = f"trace {label['trace_id']}, token {at} ({different.size} tokens differ)"
            check.fail(where, f"value {found[at]:.6g}", f"{wanted[at]:.6g}", label["trace_id"])
    return check


def every_correct_trace(content: Content, kind: str) -> Check:
    """Every correct trace has a row of labels, whatever became of it, and no other trace has one."""
    check = Check(f"token_labels/kind={kind}", "every correct trace has a row, and no other")
    if {(TOKEN_LABELS.name, kind), (TRACES.name, None)} & content.incomplete:
        return check
    rows = content.frame(TRACES).select("trace_id", "correct").to_dicts()
    labels = set(content.frame(TOKEN_LABELS, kind)["trace_id"].to_list())
    for row in rows:
        check.seen += 1
        has = row["trace_id"] in labels
        if has != bool(row["correct"]):
            seen = "a row" if has else "no row"
            told = "correct" if row["correct"] else "not correct"
            check.fail(
                f"trace {row['trace_id']}", seen, "none" if has else f"one, as it is {told}", row["trace_id"]
            )
    return check


def _labelled(content: Content, kind: str, skip: Set[str]) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    rows = content.frame(TOKEN_LABELS, kind).filter(pl.col("status") == "labelled")
    return [
        (row, content.lengths[row["trace_id"]])
        for row in rows.drop_nulls(("importance", "value")).to_dicts()
        if row["trace_id"] in content.lengths and row["trace_id"] not in skip
    ]


def _window_rows(content: Content, kind: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    good = content.frame(WINDOWS, kind).filter(pl.col("status") == "ok").drop_nulls(("start", "stop"))
    for row in good.to_dicts():
        found.setdefault(row["trace_id"], []).append(row)
    return found


def _interventions(content: Content, kind: str) -> dict[str, tuple[list[tuple[int, int]], list[float]]]:
    """Spans and values per trace: of windows, and of removals of a single block."""
    found: dict[str, tuple[list[tuple[int, int]], list[float]]] = {}
    for trace_id, rows in _window_rows(content, kind).items():
        known = [row for row in rows if row["delta_nll"] is not None]
        spans = [(row["start"], row["stop"]) for row in known]
        found[trace_id] = (spans, [row["delta_nll"] for row in known])
    single = content.frame(EVICTION_KL, kind).filter(pl.col("blocks").list.len() == 1).drop_nulls("kl")
    for row in single.select("trace_id", "blocks", "kl").to_dicts():
        spans, values = found.setdefault(row["trace_id"], ([], []))
        spans.append(blocks_of(row)[0])
        values.append(row["kl"])
    return found


def _mean(total: int, spans: Spans, values: Sequence[float]) -> NDArray[np.float64]:
    sums, counts = np.zeros(total), np.zeros(total)
    for (start, stop), value in zip(spans, values, strict=True):
        sums[start:stop] += value
        counts[start:stop] += 1
    with np.errstate(invalid="ignore"):
        return sums / counts


def _numbers(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)  # None becomes NaN
