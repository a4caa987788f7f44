"""Checks of the eviction_kl table: where the blocks lie, and what the numbers of a row say of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from cfkv.schemas import EVICTION_KL, TOKEN_LABELS
from cfkv.validate._check import Check
from cfkv.validate._content import Content

TOLERANCE = 1e-6
Block = tuple[int, int]


def removal_spans(content: Content, kind: str) -> Check:
    """Steps leave the horizon to replay; one or two blocks lie in the reasoning before the step."""
    check = Check(
        f"eviction_kl/kind={kind}", "steps lie inside the trace, and blocks in the reasoning before them"
    )
    for row in _rows(content, kind):
        trace = content.lengths.get(row["trace_id"])
        if trace is None:
            continue
        check.seen += 1
        where, trace_id, step = _where(row), row["trace_id"], row["step"]
        last = trace["length"] - len(row["kl_by_offset"])
        if not trace["reasoning_start"] < step <= last:
            expected = f"after {trace['reasoning_start']} and at most {last}, so that the horizon fits"
            check.fail(where, f"step {step}", expected, trace_id)
        elif not _fit(blocks_of(row), trace["reasoning_start"], min(step, trace["reasoning_stop"])):
            expected = (
                f"1 or 2 blocks inside [{trace['reasoning_start']}, {min(step, trace['reasoning_stop'])})"
            )
            check.fail(where, f"blocks {blocks_of(row)}", expected, trace_id)
    return check


def mean_of_offsets(content: Content, kind: str) -> Check:
    """`kl` is the mean of `kl_by_offset`, over as many offsets as the recorded horizon; none is negative."""
    check = Check(
        f"eviction_kl/kind={kind}", "kl is the mean over its offsets, and no divergence is negative"
    )
    horizon = content.settings(kind).get("horizon")
    for row in _rows(content, kind):
        check.seen += 1
        offsets = np.array(row["kl_by_offset"], dtype=np.float64)
        named = {
            "kl": row["kl"],
            "null_kl": row["null_kl"],
            "kl_by_offset": offsets.min() if offsets.size else None,
        }
        negative = [
            f"{name} {value:.3g}" for name, value in named.items() if value is not None and not value >= 0
        ]
        if offsets.size == 0 or (isinstance(horizon, int) and offsets.size != horizon):
            check.fail(_where(row), f"{offsets.size} offsets", f"{horizon or 'some'}", row["trace_id"])
        elif negative:
            check.fail(_where(row), ", ".join(negative), "at least 0", row["trace_id"])
        elif not close(row["kl"], offsets.mean()):
            check.fail(_where(row), f"kl {row['kl']:.6g}", f"{offsets.mean():.6g}", row["trace_id"])
    return check


def synergies(content: Content, kind: str) -> Check:
    """The synergy of a pair is its KL less those of its blocks alone at the same step; single removals have none."""
    check = Check(f"eviction_kl/kind={kind}", "synergy is KL(ij) - KL(i) - KL(j)")
    if "synergy" not in content.frame(EVICTION_KL, kind).columns:
        return check
    rows = _rows(content, kind)
    alone = {(*_place(row), blocks_of(row)[0]): row["kl"] for row in rows if len(blocks_of(row)) == 1}
    for row in rows:
        blocks, synergy = blocks_of(row), row["synergy"]
        if len(blocks) == 1 and synergy is not None:
            check.fail(_where(row), f"synergy {synergy:.6g} of a single removal", "null", row["trace_id"])
        if len(blocks) != 2:
            continue
        singles = [alone.get((*_place(row), block)) for block in blocks]
        if None in singles:
            continue
        check.seen += 1
        wanted = row["kl"] - sum(value for value in singles if value is not None)
        if synergy is None or not close(synergy, wanted, scale=row["kl"]):
            seen = "null" if synergy is None else f"{synergy:.6g}"
            check.fail(_where(row), f"synergy {seen}", f"{wanted:.6g}", row["trace_id"])
    return check


def counted_removals(content: Content, kind: str) -> Check:
    """n_windows of token_labels is the number of removals (or of single ones, beside pairs)."""
    check = Check(f"token_labels/kind={kind}", "n_windows is the number of removals")
    rows = content.frame(EVICTION_KL, kind)
    numbers = rows.group_by("trace_id").agg(number=pl.len(), single=(pl.col("blocks").list.len() == 1).sum())
    made = {trace_id: {number, single} for trace_id, number, single in numbers.iter_rows()}
    if (EVICTION_KL.name, kind) in content.incomplete:
        return check
    for label in content.frame(TOKEN_LABELS, kind).to_dicts():
        check.seen += 1
        found = made.pop(label["trace_id"], {0})
        if (label["n_windows"] or 0) not in found:
            seen, expected = f"n_windows {label['n_windows']}", " or ".join(map(str, sorted(found)))
            check.fail(f"trace {label['trace_id']}", seen, expected, label["trace_id"])
    if (TOKEN_LABELS.name, kind) not in content.incomplete:
        for trace_id, number in made.items():
            seen = f"{max(number)} removals and no row of labels"
            check.fail(f"trace {trace_id}", seen, "a row", trace_id)
    return check


def close(seen: float, wanted: float, scale: float = 1.0) -> bool:
    """Equal to 1e-6, relative to 1 or to the larger of the numbers behind them; NaN equals NaN."""
    if np.isnan(seen) or np.isnan(wanted):
        return bool(np.isnan(seen) and np.isnan(wanted))
    return bool(abs(seen - wanted) <= TOLERANCE * max(1.0, abs(scale), abs(wanted)))


def blocks_of(row: Mapping[str, Any]) -> list[Block]:
    """The blocks of a row as pairs."""
    return [(block["start"], block["stop"]) for block in row["blocks"]]


def _rows(content: Content, kind: str) -> list[dict[str, Any]]:
    return content.frame(EVICTION_KL, kind).drop_nulls(("step", "blocks", "kl", "kl_by_offset")).to_dicts()


def _fit(blocks: Sequence[Block], first: int, last: int) -> bool:
    return len(blocks) in (1, 2) and all(
        start is not None and stop is not None and first <= start < stop <= last for start, stop in blocks
    )


def _place(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["trace_id"], row["scope"], row["step"]


def _where(row: Mapping[str, Any]) -> str:
    return f"trace {row['trace_id']}, step {row['step']}, block_index {row['block_index']}"
