"""R-KV with a payload term (methods 2)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._avokv import AVOKV, AvokvPolicy, normalised
from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._common import Kernel
from cfkv.policies._redundancy import importance, shared_out


@policy_kinds.register
@parameters
class AvokvERkvPayload(AvokvPolicy):
    """R-KV's score plus a twentieth of the rank of the value norm."""

    source: ClassVar[str] = f"{AVOKV}, ablation R-KV + payload"
    needs: ClassVar[tuple[str, ...]] = ("keys", "queries", "values")
    equation: ClassVar[str] = "s(j) = .1 importance - .9 redundancy (R-KV, no ranks) + .05 b"
    deviations: ClassVar[str] = "the paper names this ablation and gives no formula"

    kernel: Kernel = 7

    def score(self, view: View) -> Tensor:
        """Of the terms, only payload is ranked."""
        read = importance(view, view["queries"], self.observation, self.kernel)
        repeated = shared_out(self.redundancy(view), view.valid)
        payload = normalised(self.payload(view), view, self.normaliser, self.buckets)
        return self.read_weight * read - self.redundancy_weight * repeated + self.payload_weight * payload
