"""EpiKV's causal LagKV: a spread on the scale of the chunk before (methods 3.4)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from cfkv.policies._base import Policy, Protection, View, parameters
from cfkv.policies._common import Count, prompt_and_window
from cfkv.policies._order import Ordered

EPSILON = 1e-9


@parameters
class LagChunkPolicy(Policy):
    """Chunks of 128 cached tokens; vectors averaged over layers, scores over KV heads. One mask."""

    chunk: Count = 128

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt and the study's recent window."""
        return prompt_and_window(slots)

    @abstractmethod
    def vectors(self, view: View) -> list[Tensor]:
        """The columns [L, G, S, D] whose spreads are added."""

    def score(self, view: View) -> Tensor:
        """Membership of chunks is by rank in the cache, so it drifts as tokens go, as in the study."""
        ordered, length = Ordered(view), int(view.valid.sum())
        total = torch.zeros(view.positions.shape, device=view.positions.device)
        for column in self.vectors(view):
            rows = ordered.take_vectors(column.float().mean(dim=0, keepdim=True))[0]
            total[0, 0, :length] += spreads(rows[:, :length], self.chunk)
        return ordered.back(total)


def spreads(rows: Tensor, chunk: int) -> Tensor:
    """std over channels of [G, n, D], scaled by the previous chunk's range, mean over G; raw in the first chunk."""
    parts = list(rows.split(chunk, dim=1))
    found = [parts[0].std(dim=-1)]
    for before, part in zip(parts, parts[1:], strict=False):
        low, high = before.amin(dim=1, keepdim=True), before.amax(dim=1, keepdim=True)
        found.append(((part - low) / (high - low + EPSILON)).std(dim=-1))
    return torch.cat(found, dim=1).mean(dim=0)
