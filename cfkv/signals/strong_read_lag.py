"""How soon a key is read strongly (AvoKV-E's first strong read, methods 5.3)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import Observation, signal_kinds
from cfkv.signals._received import PerKey, ReceivedSignal, without_future
from cfkv.signals._rows import AttentionRows


@signal_kinds.register
class StrongReadLag(ReceivedSignal):
    """Queries until the first that gives the key 5 times its uniform share, mean over heads; 33 if none of 32 does.

    Uniform share: 1 / visible keys of the query. Right-censored: NaN where the trace ends first.
    """

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "queries"
    source: ClassVar[str] = "AvoKV-E, first strong read"
    horizon: ClassVar[int] = 32
    start: ClassVar[float] = 33.0  # one more than the horizon: not read within it
    factor: ClassVar[float] = 5.0

    def add(self, values: Tensor, rows: AttentionRows, observation: Observation) -> None:
        """The smallest lag stays."""
        lags = torch.arange(1, self.horizon + 1, device=values.device, dtype=values.dtype)
        strong = rows.band_GBO.mean(dim=0) > self.factor / rows.visible_B[:, None]
        found = torch.where(strong & (rows.band_keys_BO >= 0), lags, self.start)
        index = rows.band_keys_BO.clamp(min=0)
        values.scatter_reduce_(1, index.flatten()[None], found.flatten()[None], "amin")

    def read(self, state: PerKey) -> Tensor:
        """Unread tokens whose horizon lies beyond the trace are unknown."""
        values = super().read(state)
        unknown = without_future(values, self.horizon)
        return torch.where(values < self.start, values, unknown)
