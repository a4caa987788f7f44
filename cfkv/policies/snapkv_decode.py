"""SnapKV while generating, as R-KV's baseline runs it (methods 1.7)."""

from __future__ import annotations

from typing import ClassVar, Literal

from cfkv.policies._base import Schedule, parameters, policy_kinds
from cfkv.policies._common import Count, Kernel
from cfkv.policies.snapkv import Snapkv


@policy_kinds.register
@parameters
class SnapkvDecode(Snapkv):
    """SnapKV with the last 8 queries and max pooling, every 128 generated tokens."""

    source: ClassVar[str] = "R-KV (arXiv:2505.24133), its SnapKV baseline"
    equation: ClassVar[str] = "s(j) = max pool over j of the mean over the last 8 rows of a(i, j)"
    deviations: ClassVar[str] = "of SnapKV: acts while generating"

    observation: Count = 8
    kernel: Kernel = 7
    pooling: Literal["average", "max"] = "max"
    every: Count = 128

    @property
    def schedule(self) -> Schedule:
        """Every 128 generated tokens."""
        return Schedule("every_m", self.every)
