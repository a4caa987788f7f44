"""Attention from the last query of the trace (TOVA's score, methods 1.6)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.attention_window import AttentionWindow


@signal_kinds.register
class AttentionLast(AttentionWindow):
    """Of the last query, mean over the query heads of a KV head."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "attention"
    source: ClassVar[str] = "TOVA"
    queries: ClassVar[int] = 1
