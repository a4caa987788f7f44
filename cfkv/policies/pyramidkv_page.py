"""PAGE's PyramidKV: one mask whose scores weigh early layers most (methods 1.8)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._common import Count
from cfkv.policies.snapkv_page import SnapkvPage


@policy_kinds.register
@parameters
class PyramidkvPage(SnapkvPage):
    """PAGE's SnapKV with layers weighted from 1.95 down to 0.05, one mask; acts once."""

    source: ClassVar[str] = "PAGE, its PyramidKV"
    equation: ClassVar[str] = (
        "s(j) = weighted mean over layers of SnapKV's row mean, weights linear from 2 - 1/20 to 1/20"
    )
    deviations: ClassVar[str] = (
        "of PyramidKV: one mask, the same budget in all layers; PAGE prints no weights, these are the schedule's"
    )

    beta: Count = 20

    def score(self, view: View) -> Tensor:
        """Early layers count most."""
        rows = view["attention"].mean(dim=(1, 2))
        weights = torch.linspace(2 - 1 / self.beta, 1 / self.beta, len(rows), device=rows.device)
        return (weights / weights.sum() @ rows)[None, None]
