"""The labels of a trace as validity reads them: importance, graded value, and which of both a policy is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfkv import store
from cfkv.analysis.high_damage import graded_kinds, with_high_damage
from cfkv.analysis.validity import Truth
from cfkv.config import percent
from cfkv.errors import CfkvError, unknown_name
from cfkv.schemas import TOKEN_LABELS, TRACES
from cfkv.stage import Run

CONTROLS = frozenset({"null"})  # kinds that measure noise and call no token important


@dataclass(frozen=True)
class TraceLabels:
    """One kind's labels of one trace, [N]: importance (-1 untested, 0, 1) and value (NaN untested).

    `graded` : the kind stores a value and no verdict, so that the value is the label and importance is high damage.
    """

    kind: str
    importance: NDArray[np.int8]
    value: NDArray[np.float32]
    graded: bool

    def candidates(self, step: int) -> NDArray[np.int64]:
        """Positions of the tested tokens among the first `step`, ascending."""
        return np.flatnonzero(self.importance[:step] >= 0)

    def column(self) -> Tensor:
        """What policies made from labels see, [N]: the graded value or the importance; NaN where untested."""
        tested = self.importance >= 0
        known = self.value if self.graded else self.importance.astype(np.float32)
        return torch.from_numpy(np.where(tested, known, np.float32(np.nan)).astype(np.float32))

    def truth(self, candidates: NDArray[np.int64]) -> Truth:
        """The same of some candidates, for the measures."""
        value = self.value[candidates].astype(np.float64)
        important = self.importance[candidates] == 1
        return Truth(important, value if self.graded else important.astype(np.float64), value)


@dataclass(frozen=True)
class LabelledTrace:
    """A trace that some kind labels."""

    trace_id: str
    problem_id: str
    token_ids: list[int]
    prompt_len: int
    reasoning: tuple[int, int]
    answer_start: int
    labels: tuple[TraceLabels, ...]

    def step(self, checkpoint: str) -> int:
        """Tokens cached at a checkpoint: all before the answer, or up to that share of the reasoning (rounded)."""
        if checkpoint == "end":
            return self.answer_start
        start, stop = self.reasoning
        return max(1, start + int(percent(checkpoint) * (stop - start) + 0.5))


def labelled_kinds(run: Run, asked: Sequence[str]) -> list[str]:
    """The label kinds that are judged, sorted.

    Raises
    ------
    CfkvError
        If the run has no labels, or not those that were asked for.
    """
    names = run.manifest.read()["stages"]
    known = sorted(name.partition(":")[2] for name in names if name.startswith("label:"))
    if not known:
        raise CfkvError(
            f"{run.path} has no labels to hold policies against; run `cfkv label {run.path}` first"
        )
    for kind in asked:
        if kind != "all" and kind not in known:
            raise unknown_name("label kind of this run", kind, known)
    wanted = set(asked) | ({*known} - CONTROLS if "all" in asked else set())
    found = [kind for kind in known if kind in wanted]
    if not found:
        raise CfkvError(
            f"{run.path} has labels of {', '.join(known)} alone, a control that calls no token important; run "
            f"`cfkv label {run.path} --kind occlusion`, or name it as --kinds"
        )
    return found


def labelled_traces(run: Run, index: int, kinds: Sequence[str], high_damage: float) -> list[LabelledTrace]:
    """The traces of one part that some kind labels, in the order of the traces table."""
    traces = _part(run, index, None)
    frames = [
        with_high_damage(found, traces, high_damage).with_columns(graded=pl.lit(kind in graded_kinds(found)))
        for kind in kinds
        for found in [_part(run, index, kind).filter(pl.col("status") == "labelled")]
    ]
    labels: dict[str, list[TraceLabels]] = {}
    for row in pl.concat(frames).iter_rows(named=True):
        labels.setdefault(row["trace_id"], []).append(_labels(row))
    return [
        LabelledTrace(
            row["trace_id"],
            row["problem_id"],
            row["token_ids"],
            row["prompt_len"],
            (row["reasoning_start"], row["reasoning_stop"]),
            row["answer_start"],
            tuple(labels[row["trace_id"]]),
        )
        for row in traces.iter_rows(named=True)
        if row["trace_id"] in labels
    ]


def _part(run: Run, index: int, kind: str | None) -> pl.DataFrame:
    table = TRACES if kind is None else TOKEN_LABELS
    content = store.read_part(store.part_path(run.path, table, kind, index), table)
    return pl.DataFrame(pl.from_arrow(content))


def _labels(row: Mapping[str, Any]) -> TraceLabels:
    importance = np.array(row["importance"], dtype=np.int8)
    value = np.full(importance.size, np.nan, dtype=np.float32)
    if row["value"] is not None:
        value = np.array(row["value"], dtype=np.float32)
    return TraceLabels(row["kind"], importance, value, row["graded"])
