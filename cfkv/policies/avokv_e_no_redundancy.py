"""AvoKV-E without its redundancy term (methods 2)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._avokv import AVOKV, AvokvPolicy
from cfkv.policies._base import parameters, policy_kinds


@policy_kinds.register
@parameters
class AvokvENoRedundancy(AvokvPolicy):
    """AvoKV-E by read pressure and payload alone."""

    source: ClassVar[str] = f"{AVOKV}, ablation no-redundancy"
    needs: ClassVar[tuple[str, ...]] = ("attention", "values")
    equation: ClassVar[str] = "s(j) = .1 p + .05 b"

    redundancy_weight: float = 0.0
