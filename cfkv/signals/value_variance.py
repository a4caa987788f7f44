"""Variance of a cached value over its head dimension (EpiKV's KV-val policy, methods 3.3)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, present, signal_kinds


@signal_kinds.register
class ValueVariance(CausalSignal):
    """Unbiased variance over the head dimension, per KV head."""

    group: ClassVar[str] = "kv"
    observes: ClassVar[str] = "kv"
    unit: ClassVar[str] = "squared value units"
    source: ClassVar[str] = "EpiKV, KV-val"

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        return present(observation.values_GCD, "values").var(dim=-1, correction=1), None
