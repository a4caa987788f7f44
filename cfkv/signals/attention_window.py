"""Attention from the last queries of the trace (SnapKV's score before its pooling, methods 1.7)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import Observation, signal_kinds
from cfkv.signals._received import ReceivedSignal
from cfkv.signals._rows import AttentionRows


@signal_kinds.register
class AttentionWindow(ReceivedSignal):
    """Mean over the last 32 queries, and over the query heads of a KV head."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "attention per query"
    source: ClassVar[str] = "SnapKV, observation window"
    heads: ClassVar[bool] = True
    queries: ClassVar[int] = 32

    def add(self, values: Tensor, rows: AttentionRows, observation: Observation) -> None:
        """Rows before the window are passed over."""
        first = max(observation.length - self.queries - rows.start, 0)
        if rows.start + first < rows.stop:
            share = rows.by_kv_head_GBK[:, first:].sum(dim=1) / min(self.queries, observation.length)
            values[:, rows.first_key : rows.stop_key] += share
