"""AvoKV-E, payload-aware eviction (methods 2)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._avokv import AVOKV, AvokvPolicy
from cfkv.policies._base import parameters, policy_kinds


@policy_kinds.register
@parameters
class AvokvE(AvokvPolicy):
    """Keep keys that are read, not repeated and carry a large value, by ranks per KV head, every 128 tokens."""

    source: ClassVar[str] = AVOKV
