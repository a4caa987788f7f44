"""The labels upside down: the floor of every score (from the labels)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies.oracle import Oracle


@policy_kinds.register
@parameters
class AntiOracle(Oracle):
    """Keep the prompt, the newest tokens, and those with the smallest label."""

    equation: ClassVar[str] = "s(j) = -label of j; 0 where it is untested"

    def score(self, view: View) -> Tensor:
        """The negative label."""
        return -super().score(view)
