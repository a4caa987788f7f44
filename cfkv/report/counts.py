"""What a run holds, counted from its tables: every share in the report stands beside its counts."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from cfkv.schemas import NOT_FAILURES


@dataclass(frozen=True)
class TraceCounts:
    """Traces by outcome; `failed` maps a status to the number of traces and one of their reasons."""

    problems: int
    traces: int
    correct: int
    incorrect: int
    ungraded: int
    skipped: int
    failed: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class WindowCounts:
    """Windows of one label kind: `tested` ran to the end, `accepted` of them needed no decoding because the
    original answer was accepted as a whole draft; `mean_accepted` is in tokens."""

    tested: int
    failed: int
    flipped: int
    answered: int
    accepted: int
    mean_accepted: float | None


def count_traces(traces: pl.DataFrame) -> TraceCounts:
    """Problems and traces, graded and failed."""
    good = traces.filter(pl.col("status") == "ok")
    failed = (
        traces.filter(~pl.col("status").fill_null("").is_in(NOT_FAILURES))
        .with_columns(pl.col("status", "reason").fill_null(""))
        .group_by("status", maintain_order=True)
        .agg(number=pl.len(), reason=pl.col("reason").first())
        .sort("number", descending=True, maintain_order=True)
    )
    return TraceCounts(
        problems=traces.select("dataset", "problem_id").unique().height,
        traces=traces.height,
        correct=good.filter(pl.col("correct")).height,
        incorrect=good.filter(~pl.col("correct")).height,
        ungraded=good["correct"].null_count(),
        skipped=traces.filter(pl.col("status") == "skipped").height,
        failed={status: (number, reason) for status, number, reason in failed.iter_rows()},
    )


def count_windows(windows: pl.DataFrame, kind: str) -> WindowCounts:
    """Windows of one kind by outcome."""
    tried = windows.filter(pl.col("kind") == kind)
    done = tried.filter(pl.col("status") == "ok")
    mean = done["accepted_draft"].mean()
    return WindowCounts(
        tested=done.height,
        failed=tried.height - done.height,
        flipped=done.filter(pl.col("flipped")).height,
        answered=done.filter(pl.col("answered")).height,
        accepted=done.filter(pl.col("decoded") == 0).height,
        mean_accepted=float(mean) if isinstance(mean, float | int) else None,
    )


@dataclass(frozen=True)
class RemovalCounts:
    """Removals of one label kind: `replayed` rows, `pairs` of them of two blocks, at `checkpoints` of `traces`."""

    replayed: int
    pairs: int
    checkpoints: int
    traces: int


def count_removals(eviction_kl: pl.DataFrame, kind: str) -> RemovalCounts:
    """Rows of the eviction table of one kind."""
    rows = eviction_kl.filter(pl.col("kind") == kind)
    return RemovalCounts(
        replayed=rows.height,
        pairs=rows.filter(pl.col("blocks").list.len() > 1).height,
        checkpoints=rows.select("trace_id", "step").unique().height,
        traces=rows["trace_id"].n_unique(),
    )


def label_kinds(*tables: pl.DataFrame) -> list[str]:
    """Label kinds in any of the tables, in the order in which they appear."""
    return list(dict.fromkeys(kind for table in tables for kind in table["kind"].unique(maintain_order=True)))


def failure_rows(
    traces: pl.DataFrame,
    windows: pl.DataFrame,
    token_labels: pl.DataFrame,
    probed: pl.DataFrame,
    evaluations: pl.DataFrame | None = None,
) -> list[dict[str, str]]:
    """Every row of these tables that did not end well: table, item, status, reason."""
    empty = pl.lit("")
    wanted = [
        ("traces", traces, ["ok"], empty),
        ("token_labels", token_labels, ["labelled"], pl.col("kind")),
        ("windows", windows, ["ok"], pl.format("{} window {}", "kind", "window_index")),
        ("probed", probed, ["ok"], pl.col("group")),
    ]
    if evaluations is not None:
        wanted.append(("evaluations", evaluations, ["ok"], pl.col("arm")))
    rows: list[dict[str, str]] = []
    for name, frame, good, part in wanted:
        bad = frame.filter(~pl.col("status").fill_null("").is_in(good)).select(
            table=pl.lit(name),
            trace_id=pl.col("trace_id"),
            part=part,
            status=pl.col("status").fill_null("(none)"),
            reason=pl.col("reason").fill_null(""),
        )
        rows += bad.to_dicts()
    return rows
