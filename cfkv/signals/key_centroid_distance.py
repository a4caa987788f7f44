"""Distance of a key to the mean of the keys so far (ManifoldKV's score, made causal)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds
from cfkv.signals._sums import running_sum


@signal_kinds.register
class KeyCentroidDistance(CausalSignal):
    """||k(t) - mean of k(0..t)|| per KV head; 0 for the first token."""

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("keys_GCD",)
    unit: ClassVar[str] = "key L2 norm"
    source: ClassVar[str] = "ManifoldKV, with the centroid as it stood when the token came"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, Tensor]:
        """The sum of all keys is handed on."""
        keys = self.seen(observation)
        sums = running_sum(memory, keys)
        counts = torch.arange(observation.start + 1, observation.stop + 1, device=keys.device)
        return (keys - sums / counts[:, None]).norm(dim=-1), sums[:, -1].clone()
