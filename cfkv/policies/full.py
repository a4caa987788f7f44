"""No eviction (methods 1.1)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import Policy, Schedule, View, parameters, policy_kinds


@policy_kinds.register
@parameters
class Full(Policy):
    """Keep every token: the ceiling of every comparison."""

    frozen: ClassVar[bool] = True
    source: ClassVar[str] = "baseline"
    equation: ClassVar[str] = "s = 0"

    @property
    def schedule(self) -> Schedule:
        """It never acts."""
        return Schedule("never")

    def score(self, view: View) -> Tensor:
        """All alike: under a budget the newest would stay."""
        return torch.zeros_like(view.positions, dtype=torch.float32)
