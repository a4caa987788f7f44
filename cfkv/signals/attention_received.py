"""Attention that a key receives from all later queries (H2O's score, methods 1.4)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import Observation, signal_kinds
from cfkv.signals._received import ReceivedSignal
from cfkv.signals._rows import AttentionRows


@signal_kinds.register
class AttentionReceived(ReceivedSignal):
    """Sum over the queries at or after the token, mean over the query heads of a KV head.

    It falls with position, since late keys are seen by few queries; `attention_received_mean` does not.
    """

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "attention mass"
    source: ClassVar[str] = "H2O, cumulative attention"
    heads: ClassVar[bool] = True

    def add(self, values: Tensor, rows: AttentionRows, observation: Observation) -> None:
        """Sums over the rows."""
        values[:, rows.first_key : rows.stop_key] += rows.received_GK
