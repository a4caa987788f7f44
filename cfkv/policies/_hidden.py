"""EpiKV's hidden-state policies: how far block outputs move from token to token, early less late layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import Memory, Seen, parameters
from cfkv.policies._born import BornPolicy, band_mean, chosen_layers


@parameters
class HiddenPolicy(BornPolicy):
    """Smoothed differences of two layers of a 32-layer model, 10 and 21, or of the same depth, subtracted."""

    observes: ClassVar[tuple[str, ...]] = ("hidden_diff",)
    smoothing: ClassVar[str]  # the same as `cfkv correlate` names it, for layers=from:RUN
    early_band: ClassVar[range] = range(10, 11)
    late_band: ClassVar[range] = range(21, 22)
    early_weight: ClassVar[float] = 1.0

    early: tuple[int, ...] | None = None
    late: tuple[int, ...] | None = None

    @property
    def banded(self) -> bool:
        """Whether its layers are bands by default."""
        return max(len(self.early_band), len(self.late_band)) > 1

    @abstractmethod
    def smooth(self, memory: Memory, series: Tensor) -> Tensor:
        """The two series [2, C], smoothed."""

    def births(self, memory: Memory, seen: Seen, new: Tensor) -> Tensor:
        """Each band is averaged first, then smoothed."""
        series = self.series(seen["hidden_diff"][:, new])
        early, late = self.smooth(memory, series)
        return (self.early_weight * early - late).float()

    def series(self, differences: Tensor) -> Tensor:
        """[2, C] of [L, C]: the early and the late band."""
        layers = differences.shape[0]
        bands = (
            chosen_layers(self.early, self.early_band, layers, self.name),
            chosen_layers(self.late, self.late_band, layers, self.name),
        )
        return torch.stack([band_mean(differences, band) for band in bands])
