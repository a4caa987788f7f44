"""Attention that a key receives, per query that could see it (observed attention)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import signal_kinds
from cfkv.signals._received import PerKey, later_queries
from cfkv.signals.attention_received import AttentionReceived


@signal_kinds.register
class AttentionReceivedMean(AttentionReceived):
    """`attention_received` over the number of queries at or after the token."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "attention per later query"
    source: ClassVar[str] = "observed attention; H2O without its drift"

    def read(self, state: PerKey) -> Tensor:
        """Divide by the queries that came."""
        received = super().read(state)
        return received / later_queries(received)
