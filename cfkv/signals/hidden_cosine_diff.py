"""Change of direction of the residual stream from one token to the next."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfkv.signals._base import CausalSignal, Observation, signal_kinds


@signal_kinds.register
class HiddenCosineDiff(CausalSignal):
    """1 - cos(h(t), h(t-1)), from 0 (same direction) to 2; NaN for the first token of all."""

    group: ClassVar[str] = "hidden"
    observes: ClassVar[tuple[str, ...]] = ("hidden_CE",)
    unit: ClassVar[str] = "1 - cosine"
    source: ClassVar[str] = "EpiKV, scale-free variant of g_l(t)"
    embedding: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, Tensor]:
        """The last direction of a chunk is kept for the first token of the next."""
        # 1 - cos = |u - v|^2 / 2 for unit vectors: exactly 0 for equal states, where 1 - u.v cancels to noise.
        units = normalize(self.seen(observation), dim=-1)
        before = torch.full_like(units[:1], torch.nan) if memory is None else memory
        change = torch.diff(units, dim=0, prepend=before)
        return change.square().sum(dim=-1)[None] / 2, units[-1:].clone()
