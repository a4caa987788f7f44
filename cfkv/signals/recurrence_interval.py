"""Longest time between two readings of a key (LazyEviction's MRI, methods 1.22)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import TO_END, Observation, Signal, found, signal_kinds


@dataclass
class Recurrence:
    """Per key: the query that last read it, and the longest gap so far; changed in place."""

    stamps: Tensor
    gaps: Tensor
    seen: int = 0


@signal_kinds.register
class RecurrenceInterval(Signal):
    """Largest gap between successive queries of which some head gives the key its uniform share or more.

    Uniform share: 1 / visible keys of the query. A key counts as read when it is written; the time since the last
    reading is no gap (`last_refresh_age` is like it).
    """

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "tokens"
    source: ClassVar[str] = "LazyEviction, MRI; threshold 1/n, maximum over heads"
    horizon: ClassVar[int] = TO_END

    def init(self) -> Recurrence | None:
        """The length of the trace is known with the first observation."""
        return None

    def update(self, state: Recurrence | None, observation: Observation) -> Recurrence:
        """Gaps between the readings of the block, and from the last one before it."""
        rows = found(observation.rows, "rows")
        if state is None:
            keys = torch.arange(observation.length, device=rows.visible_B.device, dtype=torch.float32)
            state = Recurrence(keys, torch.zeros_like(keys))
        stamps, gaps = (t[rows.first_key : rows.stop_key] for t in (state.stamps, state.gaps))
        read = rows.strongest_BK >= 1 / rows.visible_B[:, None]
        times = torch.arange(rows.start, rows.stop, device=stamps.device, dtype=stamps.dtype)[:, None]
        latest = running_maximum(torch.cat([stamps[None], torch.where(read, times, -1.0)]))
        torch.maximum(gaps, ((times - latest[:-1]) * read).amax(dim=0), out=gaps)
        stamps.copy_(latest[-1])
        state.seen = rows.stop
        return state

    def read(self, state: Recurrence) -> Tensor:
        """The keys so far."""
        return state.gaps[None, : state.seen]


def running_maximum(rows: Tensor) -> Tensor:
    """Maximum of each row and those before it, by doubling: a few passes, with no indices made."""
    step = 1
    while step < rows.shape[0]:
        rows = torch.cat([rows[:step], torch.maximum(rows[step:], rows[:-step])])
        step *= 2
    return rows
