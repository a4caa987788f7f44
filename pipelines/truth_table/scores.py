"""Labels against the planted truth, and what perfect flips would reach: all intervals resample traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from cfkv.analysis.association import pairwise_wins, rank
from cfkv.analysis.intervals import Estimate
from cfkv.analysis.resampling import bootstrap_auroc, bootstrap_share, cluster_counts
from cfkv.kinds import kind_facts
from cfkv.labels._windows import token_importance, windows
from cfkv.loader import load
from cfkv.problems.registers import PlantedTruth, planted_truth

Bools = NDArray[np.bool_]
DRAWS, SEED = 2000, 0


@dataclass(frozen=True)
class Planted:
    """A labelled trace with what was planted in it; token i of the reasoning is token start + i of the trace."""

    trace_id: str
    words: list[str]  # of the whole trace, one per token
    start: int
    stop: int
    truth: PlantedTruth
    importance: NDArray[np.int8]  # of the reasoning
    value: NDArray[np.float32]  # of the reasoning

    @property
    def reasoning(self) -> list[str]:
        """The words of the reasoning."""
        return self.words[self.start : self.stop]

    def bearing(self, kind: str) -> Bools:
        """The tokens of the reasoning that a kind is held against."""
        return np.asarray(getattr(self.truth, kind_facts(kind).truth), dtype=bool)


def planted_traces(run: Path, kind: str) -> list[Planted]:
    """The labelled traces of a run, by id."""
    tables = load(run)
    labels = tables.token_labels.filter(pl.col("kind") == kind, pl.col("status") == "labelled")
    found = []
    for row in tables.traces.join(labels, on="trace_id").sort("trace_id").collect().to_dicts():
        start, stop = row["reasoning_start"], row["reasoning_stop"]
        words = "".join(row["token_texts"]).split()
        if len(words) != len(row["token_ids"]):
            raise ValueError(f"{row['trace_id']}: {len(words)} words for {len(row['token_ids'])} tokens")
        found.append(
            Planted(
                row["trace_id"],
                words,
                start,
                stop,
                planted_truth(words[start:stop]),
                np.array(row["importance"][start:stop], dtype=np.int8),
                np.array(row["value"][start:stop], dtype=np.float32),
            )
        )
    return found


def perfect_flips(kind: str, bearing: ArrayLike, spans: Sequence[tuple[int, int]]) -> list[bool]:
    """What a faultless model would do: a window flips if it touches a load-bearing token.

    A cut before a window (truncation) loses the window and all that follows.
    """
    marked = np.asarray(bearing, dtype=bool)
    if kind == "truncation":
        return [bool(marked[start:].any()) for start, _ in spans]
    return [bool(marked[start:stop].any()) for start, stop in spans]


def perfect_labels(kind: str, bearing: ArrayLike, size: int, stride: int) -> Bools:
    """The token labels (OR over windows) that perfect flips give, [tokens]."""
    total = len(np.asarray(bearing))
    spans = windows(0, total, size, stride)
    return token_importance(total, spans, perfect_flips(kind, bearing, spans)) == 1


def pooled_auroc(values: Sequence[ArrayLike], truth: Sequence[ArrayLike]) -> Estimate:
    """AUROC over the tokens of all traces, one array each; values that are not finite are left out.

    The 95 % interval is a percentile bootstrap over traces; the p-value is that of 0.5.
    """
    owner = np.repeat(np.arange(len(values)), [len(np.asarray(each)) for each in values])
    flat = np.concatenate([np.asarray(each, dtype=np.float32) for each in values])
    positive = np.concatenate([np.asarray(each, dtype=bool) for each in truth])
    kept = np.isfinite(flat)
    flat, positive, owner = flat[kept], positive[kept], owner[kept]
    sides = [_per_trace(owner[side], len(values)) for side in (positive, ~positive)]
    wins = pairwise_wins(rank(flat), positive, owner, len(values))
    return bootstrap_auroc(wins, sides[0], sides[1], _counts(len(values)))


def pooled_share(hits: Sequence[ArrayLike]) -> Estimate:
    """Share of True over all traces, one boolean array each, with its interval over traces."""
    arrays = [np.asarray(each, dtype=bool) for each in hits]
    successes = np.array([float(each.sum()) for each in arrays])
    totals = np.array([float(each.size) for each in arrays])
    return bootstrap_share(successes, totals, _counts(len(arrays)))


def flips_as_planted(run: Path, kind: str, traces: Sequence[Planted]) -> Estimate:
    """Share of windows that flip just where perfect ones would."""
    table = load(run).windows.filter(pl.col("kind") == kind, pl.col("status") == "ok")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table.select("trace_id", "start", "stop", "flipped").collect().to_dicts():
        rows.setdefault(row["trace_id"], []).append(row)
    right = []
    for trace in traces:
        own = rows[trace.trace_id]
        spans = [(row["start"] - trace.start, row["stop"] - trace.start) for row in own]
        expected = perfect_flips(kind, trace.bearing(kind), spans)
        right.append([row["flipped"] == each for row, each in zip(own, expected, strict=True)])
    return pooled_share(right)


def _per_trace(owner: NDArray[np.int64], traces: int) -> NDArray[np.float64]:
    return np.bincount(owner, minlength=traces).astype(np.float64)


def _counts(traces: int) -> NDArray[np.float64]:
    return cluster_counts(traces, DRAWS, np.random.default_rng(SEED))
