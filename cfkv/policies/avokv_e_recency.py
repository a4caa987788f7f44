"""AvoKV-E with recency-weighted reads (methods 2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._avokv import AVOKV, AvokvPolicy
from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._redundancy import group_rows


@policy_kinds.register
@parameters
class AvokvERecency(AvokvPolicy):
    """AvoKV-E whose read pressure weighs the newest of the 8 rows most."""

    source: ClassVar[str] = f"{AVOKV}, ablation recency-weighted"
    equation: ClassVar[str] = "s(j) = .1 p + .05 b - .9 r, p: rows weighted 1, 2, ..., 8"
    deviations: ClassVar[str] = "the paper names this ablation and gives no formula: weights grow linearly"

    def pressure(self, view: View) -> Tensor:
        """The newest row counts 8 times the oldest."""
        rows = group_rows(view)
        weights = torch.arange(1.0, rows.shape[-2] + 1, device=rows.device)
        return torch.einsum("lgws,w->lgs", rows, weights / weights.sum())
