"""Norm of a cached key (Knorm, arXiv:2406.11430, whose score is its negative)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds


@signal_kinds.register
class KeyNorm(CausalSignal):
    """||k(t)|| per KV head."""

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("keys_GCD",)
    unit: ClassVar[str] = "key L2 norm"
    source: ClassVar[str] = "Knorm"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        return self.seen(observation).norm(dim=-1), None
