"""ManifoldKV with a centroid per window of positions (methods 1.14)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._common import Count
from cfkv.policies._keys import mean_vector
from cfkv.policies.manifoldkv import Manifoldkv


@policy_kinds.register
@parameters
class ManifoldkvWindowed(Manifoldkv):
    """Keep keys far from the mean key of their own window of positions, per KV head; acts once."""

    source: ClassVar[str] = "ManifoldKV, windowed variant"
    equation: ClassVar[str] = "s(j) = ||k_j - mean over the 4,096 positions around j of k_i||_2"
    deviations: ClassVar[str] = "the window's length is printed nowhere; 4,096"

    length: Count = 4096

    def distances(self, keys: Tensor, view: View) -> Tensor:
        """Windows are counted from position 0."""
        keys = keys.float()
        window = view.positions // self.length
        result = torch.zeros(keys.shape[:-1], device=keys.device)
        for index in range((view.step - 1) // self.length + 1):
            own = view.valid & (window == index)
            distance = (keys - mean_vector(keys, own)).norm(dim=-1)
            result = torch.where(own, distance, result)
        return result
