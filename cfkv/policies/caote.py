"""How far the attention output moves when one token goes (CAOTE, arXiv:2504.14051; methods 1.16)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, View, parameters, policy_kinds
from cfkv.policies._common import Count
from cfkv.policies._heads import by_kv_head

LARGEST_SHARE = 1 - 1e-6


@policy_kinds.register
@parameters
class Caote(Policy):
    """Evict the token whose loss changes the last query's attention output least, per KV head."""

    needs: ClassVar[tuple[str, ...]] = ("attention", "values")
    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "CAOTE, on TOVA's row"
    equation: ClassVar[str] = "s(j) = a_j / (1 - a_j) * ||sum of a_i v_i - v_j||_2, a: the last row"
    deviations: ClassVar[str] = (
        "per query head, mean over the group; observation=32 is the SnapKV base; no H2O base"
    )

    observation: Count = 1

    @property
    def window(self) -> int:
        """Rows that are averaged before they are normalised."""
        return self.observation

    def outputs(self, shares: Tensor, values: Tensor, view: View) -> Tensor:
        """What the token's value is held against, [L, G, R, D]."""
        return shares @ values

    def score(self, view: View) -> Tensor:
        """Exact for one eviction."""
        values = view["values"].float().masked_fill(~view.valid[..., None], 0)
        shares = view["attention"].mean(dim=-2)
        shares = (shares / shares.sum(dim=-1, keepdim=True)).clamp(max=LARGEST_SHARE)
        grouped = shares.unflatten(1, (values.shape[1], -1))
        outputs = self.outputs(grouped, values, view)
        distances = torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist")
        return by_kv_head(shares / (1 - shares) * distances.flatten(1, 2), values.shape[1])
