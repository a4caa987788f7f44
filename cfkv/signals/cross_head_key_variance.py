"""How much the KV heads disagree on a token's key (EpiKV, ablation notes)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds


@signal_kinds.register
class CrossHeadKeyVariance(CausalSignal):
    """Population variance over the KV heads, mean over the head dimension; 0 where there is one head."""

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("keys_GCD",)
    unit: ClassVar[str] = "squared key units"
    source: ClassVar[str] = "EpiKV, ablation notes: cross-head key variance"

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        keys = self.seen(observation)
        centred = keys - keys.mean(dim=0)  # a variance over the outermost dimension is slow
        return centred.square().sum(dim=0).mean(dim=-1)[None] / keys.shape[0], None
