"""How close a key is to one that is cached already."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds
from cfkv.signals._pairs import cosine_blocks


@signal_kinds.register
class KeyMaxCosine(CausalSignal):
    """Largest cosine to an earlier key of the same KV head; NaN for the first token."""

    group: ClassVar[str] = "kv_pairwise"
    observes: ClassVar[tuple[str, ...]] = ("cached_keys_GND",)
    unit: ClassVar[str] = "cosine"
    source: ClassVar[str] = "AvoKV-E, redundancy r as a maximum"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """Each block of the new keys against those before it."""
        values = []
        for start, cosines in cosine_blocks(self.seen(observation), observation.start, earlier=True):
            rows = torch.arange(start, start + cosines.shape[1], device=cosines.device)[:, None]
            new = cosines[..., start:]
            new.masked_fill_(torch.arange(start, start + new.shape[2], device=new.device) >= rows, -torch.inf)
            values.append(cosines.amax(dim=-1))
        largest = torch.cat(values, dim=-1)
        return largest.masked_fill_(largest.isinf(), torch.nan), None
