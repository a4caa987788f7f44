"""PAGE's KeyDiff: the anchor is the centroid of the raw keys (methods 1.11)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import parameters, policy_kinds
from cfkv.policies.keydiff import Keydiff


@policy_kinds.register
@parameters
class KeydiffRaw(Keydiff):
    """Keep keys that point away from the centroid of the keys, per KV head, in blocks of 128 tokens."""

    source: ClassVar[str] = "PAGE, its KeyDiff"
    equation: ClassVar[str] = "s(j) = -cos(k_j, mean over cached i of k_i)"
    deviations: ClassVar[str] = "of KeyDiff: keys are averaged before they are normalised; a recent window"

    def anchored(self, keys: Tensor) -> Tensor:
        """The keys themselves."""
        return keys
