"""PAGE's single-mask ManifoldKV (methods 1.14)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import MaskScope, Protection, View, parameters, policy_kinds
from cfkv.policies._common import PAGE
from cfkv.policies.manifoldkv import Manifoldkv


@policy_kinds.register
@parameters
class ManifoldkvPage(Manifoldkv):
    """Keep 4 sinks, the last 32 prompt tokens and keys far from the mean key on average, one mask; acts once."""

    mask_scope: ClassVar[MaskScope] = "global"
    source: ClassVar[str] = "PAGE, single-mask ManifoldKV"
    equation: ClassVar[str] = "s(j) = mean over layers and KV heads of ||k_j - mean over i of k_i||_2"
    deviations: ClassVar[str] = "of ManifoldKV: one mask for all heads, which loses its multi-key rescue"

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """As PAGE's other policies."""
        return PAGE

    def score(self, view: View) -> Tensor:
        """Mean distance."""
        return self.distances(view["keys"], view).mean(dim=(0, 1), keepdim=True)
