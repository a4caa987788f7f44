"""Norm of the residual stream."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds


@signal_kinds.register
class HiddenNorm(CausalSignal):
    """||h(t)||."""

    group: ClassVar[str] = "hidden"
    observes: ClassVar[tuple[str, ...]] = ("hidden_CE",)
    unit: ClassVar[str] = "residual-stream L2 norm"
    source: ClassVar[str] = "EpiKV, ablation notes"
    embedding: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        return self.seen(observation).norm(dim=-1)[None], None
