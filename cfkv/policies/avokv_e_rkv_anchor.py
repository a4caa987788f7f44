"""AvoKV-E with R-KV's reading of its window (methods 2)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._avokv import AVOKV, AvokvPolicy
from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._common import Kernel
from cfkv.policies._redundancy import importance


@policy_kinds.register
@parameters
class AvokvERkvAnchor(AvokvPolicy):
    """AvoKV-E whose read pressure is R-KV's pooled importance."""

    source: ClassVar[str] = f"{AVOKV}, ablation R-KV anchor"
    needs: ClassVar[tuple[str, ...]] = ("keys", "queries", "values")
    equation: ClassVar[str] = "s(j) = .1 p + .05 b - .9 r, p: R-KV importance"
    deviations: ClassVar[str] = "the paper names this ablation and gives no formula"

    kernel: Kernel = 7

    def pressure(self, view: View) -> Tensor:
        """Over the keys before the observation window."""
        return importance(view, view["queries"], self.observation, self.kernel)
