"""ManifoldKV on keys before the rotary embedding (methods 1.14)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies.manifoldkv import Manifoldkv


@policy_kinds.register
@parameters
class ManifoldkvPrerotary(Manifoldkv):
    """Keep keys far from the mean key, both before the rotary embedding, per KV head; acts once."""

    needs: ClassVar[tuple[str, ...]] = ("raw_keys",)
    source: ClassVar[str] = "PAGE, ManifoldKV before the rotary embedding"

    def score(self, view: View) -> Tensor:
        """Distance to the centroid."""
        return self.distances(view["raw_keys"], view)
