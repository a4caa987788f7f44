"""Ada-KV's head-wise allocation, as its authors' code has it (arXiv:2407.11550; methods 1.9)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._adaptive import AdaptivePolicy, floor_of, rounded, winners
from cfkv.policies._base import View, parameters, policy_kinds


@policy_kinds.register
@parameters
class AdaKv(AdaptivePolicy):
    """Share a layer's budget over its KV heads by who has its best tokens, above a floor; over any per-head score."""

    nested: ClassVar[bool] = False
    source: ClassVar[str] = "Ada-KV (arXiv:2407.11550), its code"
    equation: ClassVar[str] = (
        "B_h = (1 - alpha) c_h + floor(alpha B), c_h: the head's tokens among the layer's best"
    )
    deviations: ClassVar[str] = (
        "rounded so that the sum is heads * B exactly; the base is SnapKV with max pooling"
    )

    def shares(self, room: int, scores: Tensor, free: Tensor, view: View) -> Tensor:
        """Blend of the winners' counts and the floor."""
        total = room * scores.shape[1]
        won = winners(scores, free, view, total).double()
        wanted = (1 - self.alpha) * won + floor_of(self.alpha, room)
        return rounded(wanted, free.sum(dim=-1), total)
