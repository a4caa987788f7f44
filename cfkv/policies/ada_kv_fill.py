"""Ada-KV's allocation, floor first and then the best of the rest (methods 1.9)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._adaptive import AdaptivePolicy, floor_of, winners
from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._budget import select


@policy_kinds.register
@parameters
class AdaKvFill(AdaptivePolicy):
    """Each KV head keeps its best tokens up to a floor; the layer's best others fill the budget; any per-head score."""

    source: ClassVar[str] = "Ada-KV as kvpress (alpha .2) and PAGE (.5) have it"
    equation: ClassVar[str] = "B_h = floor(alpha B) + the head's tokens among the layer's best that are left"
    deviations: ClassVar[str] = "of Ada-KV's code: no blend with the unconstrained counts"

    def shares(self, room: int, scores: Tensor, free: Tensor, view: View) -> Tensor:
        """Secured, then won."""
        floor = floor_of(self.alpha, room)
        secured = select(scores, view.positions, free, torch.zeros_like(free), floor)
        total = room * scores.shape[1]
        rest = total - floor * scores.shape[1]
        return secured.sum(dim=-1) + winners(scores, free & ~secured, view, rest)
