"""Norm of a cached value (AvoKV-E's payload, methods 2)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds


@signal_kinds.register
class ValueNorm(CausalSignal):
    """||v(t)|| per KV head."""

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("values_GCD",)
    unit: ClassVar[str] = "value L2 norm"
    source: ClassVar[str] = "AvoKV-E, payload b"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        return self.seen(observation).norm(dim=-1), None
