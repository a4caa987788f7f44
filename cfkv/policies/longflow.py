"""Attention times value (LongFlow; methods 1.20)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, View, parameters, policy_kinds
from cfkv.policies._heads import by_kv_head


@policy_kinds.register
@parameters
class Longflow(Policy):
    """Evict the token whose weighted value is smallest for the last query, per layer; nothing is protected."""

    needs: ClassVar[tuple[str, ...]] = ("attention", "values")
    mask_scope: ClassVar[MaskScope] = "layer"
    source: ClassVar[str] = "LongFlow, its code"
    equation: ClassVar[str] = "s(j) = mean over query heads of a(t, j) * ||v_j||_1 / d"
    deviations: ClassVar[str] = "a long prompt is compressed by the same rule, not by SnapKV"

    def score(self, view: View) -> Tensor:
        """One row."""
        values = view["values"].float()
        rows = by_kv_head(view["attention"][:, :, -1], values.shape[1])
        return (rows * values.abs().mean(dim=-1).masked_fill(~view.valid, 0)).mean(dim=1, keepdim=True)
