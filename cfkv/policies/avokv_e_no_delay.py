"""AvoKV-E without its delay (methods 2)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._avokv import AVOKV, AvokvPolicy
from cfkv.policies._base import parameters, policy_kinds


@policy_kinds.register
@parameters
class AvokvENoDelay(AvokvPolicy):
    """AvoKV-E with the newest entries as candidates."""

    source: ClassVar[str] = f"{AVOKV}, ablation no-delay"

    delay: int | None = 0
