"""Labels of the right distribution at the wrong tokens (from the labels)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies.oracle import Oracle


@policy_kinds.register
@parameters
class ShuffledOracle(Oracle):
    """Keep the prompt, the newest tokens, and those with the largest label once labels were dealt out anew."""

    needs: ClassVar[tuple[str, ...]] = ("shuffled_label",)
    equation: ClassVar[str] = "s(j) = label of another tested token of the trace; 0 where j is untested"

    def score(self, view: View) -> Tensor:
        """The other token's label."""
        return view["shuffled_label"].float().nan_to_num(nan=0.0)
