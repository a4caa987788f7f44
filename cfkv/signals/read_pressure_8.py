"""Attention that a key receives soon after it was written."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import Observation, signal_kinds
from cfkv.signals._received import PerKey, ReceivedSignal, without_future
from cfkv.signals._rows import AttentionRows


@signal_kinds.register
class ReadPressure8(ReceivedSignal):
    """Mean over the 8 queries after the token, and over the query heads of a KV head; NaN near the end."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "attention per query"
    source: ClassVar[str] = "AvoKV-E, read pressure p"
    heads: ClassVar[bool] = True
    horizon: ClassVar[int] = 8

    def add(self, values: Tensor, rows: AttentionRows, observation: Observation) -> None:
        """Each row reads the keys just before it."""
        band = rows.band_GBO[..., : self.horizon]
        keys = rows.band_keys_BO[:, : self.horizon]
        index = keys.clamp(min=0).expand_as(band).flatten(1)
        values.scatter_add_(1, index, band.flatten(1) / self.horizon)

    def read(self, state: PerKey) -> Tensor:
        """A token that fewer queries follow has no value."""
        return without_future(super().read(state), self.horizon)
