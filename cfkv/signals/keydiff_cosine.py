"""Likeness of a key to the average direction of all keys (KeyDiff, whose score is its negative)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from cfkv.signals._base import Observation, WholeSignal, signal_kinds


@signal_kinds.register
class KeydiffCosine(WholeSignal):
    """cos(k(t), mean of the unit keys of the whole trace), per KV head."""

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("cached_keys_GND",)
    unit: ClassVar[str] = "cosine"
    source: ClassVar[str] = "KeyDiff, anchor unit_mean"
    heads: ClassVar[bool] = True

    def whole(self, observation: Observation) -> Tensor:
        """One look at all keys."""
        units = normalize(self.seen(observation), dim=-1)
        anchor = normalize(units.mean(dim=1, keepdim=True), dim=-1)
        return (units * anchor).sum(dim=-1)
