"""A policy of your own: copy this file, change `score`, and run `cfkv score my_policy.py RUN`.

The file's name is the policy's. `cfkv/policies/_base.py` lists the columns that a policy may need.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, View, parameters, policy_kinds


@policy_kinds.register
@parameters
class ExamplePolicy(Policy):
    """Keep tokens that the last queries read and whose value is large, per KV head."""

    needs: ClassVar[tuple[str, ...]] = ("attention", "values")
    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "an example"
    equation: ClassVar[str] = (
        "s(j) = a(j) * ||v_j||^power, a: mean over the last queries and the group's heads"
    )

    power: float = Field(1.0, ge=0)
    queries: int = Field(16, ge=1)

    @property
    def window(self) -> int:
        """How many of the last queries are looked at."""
        return self.queries

    def score(self, view: View) -> Tensor:
        """One number per slot, [layers, KV heads, slots]; higher = keep."""
        values = view["values"].float()
        rows = view["attention"].mean(dim=2)  # [layers, query heads, slots]
        reads = rows.unflatten(1, (values.shape[1], -1)).mean(dim=2)
        return torch.where(view.valid, reads * values.norm(dim=-1) ** self.power, 0.0)
