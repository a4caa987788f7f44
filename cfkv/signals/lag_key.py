"""Spread of a key on the scale of the chunk before it (EpiKV's causal LagKV, methods 3.4)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds
from cfkv.signals._lag import causal_lag


@signal_kinds.register
class LagKey(CausalSignal):
    """std over channels of the key, scaled by the previous 128 tokens' range; raw std in the first chunk.

    Per layer and KV head; EpiKV averages over layers before. Chunks are counted from token 0 and never shift.
    """

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("keys_GCD",)
    unit: ClassVar[str] = "share of a channel's range"
    source: ClassVar[str] = "EpiKV, Lag-key"
    heads: ClassVar[bool] = True
    chunk: ClassVar[int] = 128

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, Tensor]:
        """The ranges of the previous and of the current chunk are handed on."""
        return causal_lag(memory, self.seen(observation), observation.start, self.chunk)
