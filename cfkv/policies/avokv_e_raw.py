"""AvoKV-E on raw scores (methods 2)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._avokv import AVOKV, AvokvPolicy, Normaliser
from cfkv.policies._base import parameters, policy_kinds


@policy_kinds.register
@parameters
class AvokvERaw(AvokvPolicy):
    """AvoKV-E with its terms as they are instead of their ranks."""

    source: ClassVar[str] = f"{AVOKV}, ablation raw scores"
    equation: ClassVar[str] = "s(j) = .1 p + .05 b - .9 r, no ranks"

    normaliser: Normaliser = "raw"
