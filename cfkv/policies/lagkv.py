"""Spread against the partition that follows (LagKV, arXiv:2504.04704; methods 1.13)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._common import above_all
from cfkv.policies._partitions import PartitionPolicy


@policy_kinds.register
@parameters
class Lagkv(PartitionPolicy):
    """Keep keys and values that spread widely on the scale of the next 128 tokens, per KV head."""

    source: ClassVar[str] = "LagKV (arXiv:2504.04704)"
    equation: ClassVar[str] = (
        "s(j) = softmax within the partition of std_d((x_j - min) / (max - min)), keys plus values; min and max of "
        "the next partition"
    )
    deviations: ClassVar[str] = (
        "one budget over all partitions instead of a share of each; scored anew over what is left at each eviction"
    )

    def score(self, view: View) -> Tensor:
        """The rest comes first: it is protected."""
        total = self.shares(view, view["keys"].float()) + self.shares(view, view["values"].float())
        return above_all(total, self.partitions(view)[1])
