"""Variance of a cached value over its head dimension (EpiKV's KV-val policy, methods 3.3)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds
from cfkv.signals._sums import variance


@signal_kinds.register
class ValueVariance(CausalSignal):
    """Unbiased variance over the head dimension, per KV head."""

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("values_GCD",)
    unit: ClassVar[str] = "squared value units"
    source: ClassVar[str] = "EpiKV, KV-val"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        return variance(self.seen(observation)), None
