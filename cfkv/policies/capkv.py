"""Leverage of a value under exponential weights (CapKV; methods 1.15)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, Protection, Schedule, View, parameters, policy_kinds
from cfkv.policies._common import Count
from cfkv.policies._heads import by_kv_head

LARGEST_LOGIT = 30.0


@policy_kinds.register
@parameters
class Capkv(Policy):
    """Keep values that add most to the span of those that the mean query reads, per KV head; acts once."""

    needs: ClassVar[tuple[str, ...]] = ("keys", "queries", "values")
    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "CapKV, as PAGE describes it"
    equation: ClassVar[str] = (
        "s(j) = w_j v_j' A^-1 v_j, A = I + sum of w_i v_i v_i', w_i = exp(5 k_i . mean query / sqrt(d))"
    )
    deviations: ClassVar[str] = (
        "the query is the mean of the last 32 and of the group; logits are clamped at 30"
    )

    beta: float = Field(5.0, gt=0)
    observation: Count = 32

    @property
    def window(self) -> int:
        """Queries that are averaged."""
        return self.observation

    @property
    def schedule(self) -> Schedule:
        """After the prompt."""
        return Schedule("once")

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """4 sinks."""
        return Protection(sinks=4)

    def score(self, view: View) -> Tensor:
        """In double precision: weights span 13 orders of magnitude."""
        keys, values = view["keys"].double(), view["values"].double()
        query = by_kv_head(view["queries"].double().mean(dim=-2), keys.shape[1])
        logits = (keys @ query[..., None])[..., 0] * (self.beta * keys.shape[-1] ** -0.5)
        weights = torch.where(view.valid, logits.clamp(max=LARGEST_LOGIT).exp(), 0)
        values = values.masked_fill(~view.valid[..., None], 0)
        matrix = torch.einsum("lgs,lgsd,lgse->lgde", weights, values, values)
        matrix = matrix + torch.eye(keys.shape[-1], dtype=matrix.dtype, device=matrix.device)
        solved = torch.linalg.solve(matrix, values.transpose(-1, -2)).transpose(-1, -2)
        return (weights * (values * solved).sum(dim=-1)).float()
