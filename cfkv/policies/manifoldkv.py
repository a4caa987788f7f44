"""Keys far from the centroid (ManifoldKV; methods 1.14)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, Schedule, View, parameters, policy_kinds
from cfkv.policies._keys import mean_vector


@policy_kinds.register
@parameters
class Manifoldkv(Policy):
    """Keep keys far from the mean key, per KV head; acts once."""

    needs: ClassVar[tuple[str, ...]] = ("keys",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "ManifoldKV, as PAGE describes it"
    equation: ClassVar[str] = "s(j) = ||k_j - mean over i of k_i||_2"

    @property
    def schedule(self) -> Schedule:
        """After the prompt."""
        return Schedule("once")

    def distances(self, keys: Tensor, view: View) -> Tensor:
        """[L, G, S]."""
        keys = keys.float()
        return (keys - mean_vector(keys, view.valid)).norm(dim=-1)

    def score(self, view: View) -> Tensor:
        """Distance to the centroid."""
        return self.distances(view["keys"], view)
