"""Attention of the last query, weighted by the size of what it reads (LongFlow, methods 1.20)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import Observation, present, signal_kinds
from cfkv.signals._rows import AttentionRows
from cfkv.signals.attention_last import AttentionLast


@signal_kinds.register
class LongflowScore(AttentionLast):
    """Attention of the last query times the L1 norm of the value over the head dimension, mean over query heads."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows", "cached_values_GND")
    unit: ClassVar[str] = "value L1 norm per channel"
    source: ClassVar[str] = "LongFlow"

    def add(self, values: Tensor, rows: AttentionRows, observation: Observation) -> None:
        """The last row alone."""
        super().add(values, rows, observation)
        if observation.last:
            values *= present(observation.cached_values_GND, "values").abs().mean(dim=-1)
