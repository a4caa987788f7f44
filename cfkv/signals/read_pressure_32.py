"""Attention that a key receives within its first 32 successors."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.read_pressure_8 import ReadPressure8


@signal_kinds.register
class ReadPressure32(ReadPressure8):
    """Mean over the 32 queries after the token, and over the query heads of a KV head; NaN near the end."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "attention per query"
    source: ClassVar[str] = "AvoKV-E, read pressure p"
    horizon: ClassVar[int] = 32
