"""L2 change of the residual stream from one token to the next (EpiKV eq. 1, methods 3.1)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, signal_kinds


@signal_kinds.register
class HiddenDiff(CausalSignal):
    """g(t) = ||h(t) - h(t-1)||; NaN for the first token of all, which has no predecessor."""

    group: ClassVar[str] = "hidden"
    observes: ClassVar[tuple[str, ...]] = ("hidden_CE",)
    unit: ClassVar[str] = "residual-stream L2 norm"
    source: ClassVar[str] = "EpiKV, g_l(t)"
    embedding: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, Tensor]:
        """The last state of a chunk is kept for the first token of the next."""
        hidden = self.seen(observation)
        before = torch.full_like(hidden[:1], torch.nan) if memory is None else memory
        change = torch.diff(hidden, dim=0, prepend=before)
        return change.norm(dim=-1)[None], hidden[-1:].clone()
