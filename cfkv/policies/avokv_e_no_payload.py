"""AvoKV-E without its payload term (methods 2)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._avokv import AVOKV, AvokvPolicy
from cfkv.policies._base import parameters, policy_kinds


@policy_kinds.register
@parameters
class AvokvENoPayload(AvokvPolicy):
    """AvoKV-E by read pressure and redundancy alone."""

    source: ClassVar[str] = f"{AVOKV}, ablation no-payload"
    needs: ClassVar[tuple[str, ...]] = ("attention", "keys")
    equation: ClassVar[str] = "s(j) = .1 p - .9 r"

    payload_weight: float = 0.0
