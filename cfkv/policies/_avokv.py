"""AvoKV-E's score and its ablations (methods 2): read pressure, redundancy and payload on one scale."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, Protection, Schedule, View, parameters
from cfkv.policies._common import Count, average_ranks, percentiles
from cfkv.policies._redundancy import group_rows, repetition

AVOKV = "AvoKV-E"
Normaliser = Literal["percentile", "age_bucket", "minmax", "z", "raw"]
EPSILON = 1e-9


@parameters
class AvokvPolicy(Policy):
    """Percentile ranks of read pressure, redundancy and payload among the candidates of a KV head."""

    needs: ClassVar[tuple[str, ...]] = ("attention", "keys", "values")
    mask_scope: ClassVar[MaskScope] = "kv_head"
    equation: ClassVar[str] = (
        "s(j) = .1 p + .05 b - .9 r, percentile ranks of the mean attention of the last 8 queries, the value norm "
        "and R-KV's mean cosine"
    )
    deviations: ClassVar[str] = (
        "the paper leaves open lambda_p (.1), the observation window (8), sinks (4) and masks (per KV head)"
    )

    read_weight: float = 0.1
    redundancy_weight: float = 0.9
    payload_weight: float = 0.05
    observation: Count = 8
    delay: int | None = Field(
        None, ge=0, description="Newest entries protected; default: 8 from a budget of 768 on, else 32."
    )
    sinks: int = Field(4, ge=0)
    protect_prompt: bool = False
    normaliser: Normaliser = "percentile"
    buckets: Count = 8
    every: Count = 128

    @property
    def window(self) -> int:
        """The observation window."""
        return self.observation

    @property
    def schedule(self) -> Schedule:
        """Every 128 generated tokens."""
        return Schedule("every_m", self.every)

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The newest entries, whose reads are delayed, and sinks."""
        delay = (8 if slots >= 768 else 32) if self.delay is None else self.delay
        return Protection(prompt=self.protect_prompt, sinks=self.sinks, recent=delay)

    def pressure(self, view: View) -> Tensor:
        """Mean attention of the observation window."""
        return group_rows(view).mean(dim=-2)

    def redundancy(self, view: View) -> Tensor:
        """R-KV's, before its softmax."""
        return repetition(view)

    def payload(self, view: View) -> Tensor:
        """||v||."""
        return view["values"].float().norm(dim=-1)

    def score(self, view: View) -> Tensor:
        """Candidates are what is not protected; protected slots have 0."""
        total = torch.zeros(view.positions.shape, device=view.positions.device)
        for weight, term in (
            (self.read_weight, self.pressure),
            (-self.redundancy_weight, self.redundancy),
            (self.payload_weight, self.payload),
        ):
            if weight:
                total = total + weight * normalised(term(view), view, self.normaliser, self.buckets)
        return total


def normalised(values: Tensor, view: View, how: Normaliser, buckets: int) -> Tensor:
    """`values` [L, G, S] on the scale of the candidates of each row; 0 for others.

    percentile: rank / (count - 1), ties averaged. age_bucket: the same within each of `buckets` groups of equal
    size by age. minmax: 0..1. z: standard deviations. raw: as they are.
    """
    free = view.evictable
    count = free.sum(dim=-1, keepdim=True).clamp(min=1)
    if how == "percentile":
        return percentiles(values, free)
    if how == "age_bucket":
        return _by_age(values, view, buckets, count)
    if how == "minmax":
        low = values.masked_fill(~free, torch.inf).amin(dim=-1, keepdim=True)
        high = values.masked_fill(~free, -torch.inf).amax(dim=-1, keepdim=True)
        values = (values - low) / (high - low + EPSILON)
    elif how == "z":
        mean = values.masked_fill(~free, 0).sum(dim=-1, keepdim=True) / count
        spread = ((values - mean).square().masked_fill(~free, 0).sum(dim=-1, keepdim=True) / count).sqrt()
        values = (values - mean) / (spread + EPSILON)
    return torch.where(free, values, 0)


def _by_age(values: Tensor, view: View, buckets: int, count: Tensor) -> Tensor:
    ages = average_ranks(view.positions.to(values.dtype), view.evictable)
    bucket = (ages * buckets / count).long().clamp(0, buckets - 1)
    result = torch.zeros_like(values)
    for index in range(buckets):
        inside = view.evictable & (bucket == index)
        result = result + percentiles(values, inside)
    return result
