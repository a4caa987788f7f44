"""Likeness of a key to the average direction of the keys so far (KeyDiff, made causal)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from cfkv.signals._base import CausalSignal, Observation, signal_kinds
from cfkv.signals._sums import running_sum


@signal_kinds.register
class KeydiffRunning(CausalSignal):
    """cos(k(t), mean of the unit keys 0..t), per KV head; 1 for the first token."""

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("keys_GCD",)
    unit: ClassVar[str] = "cosine"
    source: ClassVar[str] = "KeyDiff, with the anchor as it stood when the token came"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, Tensor]:
        """The sum of all unit keys is handed on."""
        units = normalize(self.seen(observation), dim=-1)
        sums = running_sum(memory, units)
        return (units * normalize(sums, dim=-1)).sum(dim=-1), sums[:, -1].clone()
