"""Change of direction of the residual stream from one token to the next."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from cfkv.signals._base import CausalSignal, Observation, present, signal_kinds


@signal_kinds.register
class HiddenCosineDiff(CausalSignal):
    """1 - cos(h(t), h(t-1)), from 0 (same direction) to 2; NaN for the first token of all."""

    group: ClassVar[str] = "hidden"
    observes: ClassVar[str] = "hidden"
    unit: ClassVar[str] = "1 - cosine"
    source: ClassVar[str] = "EpiKV, scale-free variant of g_l(t)"
    embedding: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, Tensor]:
        """The last state of a chunk is kept for the first token of the next."""
        hidden = present(observation.hidden_CE, "hidden states")
        first = torch.full_like(hidden[:1], torch.nan) if memory is None else memory
        before = torch.cat([first, hidden[:-1]])
        return (1 - cosine_similarity(hidden, before, dim=-1))[None], hidden[-1:].clone()
