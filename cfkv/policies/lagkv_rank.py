"""LagKV by ranks within its partitions, as kvpress scores it (methods 1.13)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._partitions import PartitionPolicy


@policy_kinds.register
@parameters
class LagkvRank(PartitionPolicy):
    """Keep the same share of each 128 tokens by LagKV's score, per KV head."""

    source: ClassVar[str] = "LagKV (arXiv:2504.04704) as kvpress scores it"
    equation: ClassVar[str] = "s(j) = rank of LagKV's score within the partition / 128; 1 if protected"
    deviations: ClassVar[str] = "scored anew over what is left at each eviction"

    sinks: int = Field(4, ge=0)

    def score(self, view: View) -> Tensor:
        """Ranks from 0, ties by later position."""
        index, scored = self.partitions(view)
        total = self.shares(view, view["keys"].float()) + self.shares(view, view["values"].float())
        order = view.positions.expand(total.shape).argsort(dim=-1, stable=True)
        for key in (total, index.masked_fill(~scored, torch.iinfo(index.dtype).max)):
            order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
        place = torch.empty_like(order)
        place.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand(order.shape))
        bins = index.masked_fill(~scored, 0)
        first = torch.full_like(place, place.shape[-1]).scatter_reduce(
            -1, bins, place.masked_fill(~scored, place.shape[-1]), "amin"
        )
        return torch.where(scored, (place - first.gather(-1, bins)) / self.lag, 1.0)
