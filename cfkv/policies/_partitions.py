"""LagKV's partitions: a spread on the scale of the partition that follows (methods 1.13)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, Protection, Schedule, View, parameters
from cfkv.policies._common import Count

EPSILON = 1e-9


@parameters
class PartitionPolicy(Policy):
    """Partitions of 128 positions after the sinks; the last full one and what follows are protected."""

    needs: ClassVar[tuple[str, ...]] = ("keys", "values")
    mask_scope: ClassVar[MaskScope] = "kv_head"

    sinks: int = Field(16, ge=0)
    lag: Count = 128

    @property
    def schedule(self) -> Schedule:
        """When a partition is full."""
        return Schedule("every_m", self.lag)

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """Sinks, the last full partition and the rest."""
        tail = max(step - self.sinks, 0)
        return Protection(sinks=self.sinks, recent=min(tail, self.lag + tail % self.lag))

    def partitions(self, view: View) -> tuple[Tensor, Tensor]:
        """Partition of each slot, and which slots are scored: those with a full partition after their own."""
        index = (view.positions - self.sinks).div(self.lag, rounding_mode="floor")
        full = max(view.step - self.sinks, 0) // self.lag
        return index.clamp(min=0), view.valid & (index >= 0) & (index < full - 1)

    def shares(self, view: View, vectors: Tensor) -> Tensor:
        """Softmax within each partition of the spread, [L, G, S]; garbage where not scored.

        The reference of a partition of which nothing is left is the next one that has tokens.
        """
        index, scored = self.partitions(view)
        index = index.expand(vectors.shape[:-1])
        count = int(index.masked_fill(~view.valid, 0).max()) + 1
        known = view.valid & (view.positions >= self.sinks)
        low, high = _ranges(vectors, index.clamp(max=count - 1), known, count)
        after = index.clamp(max=count - 2 if count > 1 else 0)[..., None].expand_as(vectors)
        low, high = (_following(bound).gather(-2, after) for bound in (low, high))
        spread = ((vectors - low) / (high - low + EPSILON)).std(dim=-1)
        return _softmax_within(spread, index.clamp(max=count - 1), scored.expand(spread.shape), count)


def _ranges(vectors: Tensor, index: Tensor, known: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest [L, G, count, D] of each partition; NaN if it has no token."""
    places = index[..., None].expand_as(vectors)
    shape = (*vectors.shape[:-2], count, vectors.shape[-1])
    bounds = []
    for fill, how in ((torch.inf, "amin"), (-torch.inf, "amax")):
        held = vectors.masked_fill(~known[..., None], fill)
        bound = vectors.new_full(shape, fill).scatter_reduce(-2, places, held, how)
        bounds.append(bound.masked_fill(bound.isinf(), torch.nan))
    return bounds[0], bounds[1]


def _following(bounds: Tensor) -> Tensor:
    """Of each partition but the last, the bounds of the next one that has tokens; the last keeps its own."""
    result = bounds.clone()
    for place in range(bounds.shape[-2] - 2, -1, -1):
        after = bounds[..., place + 1, :]
        result[..., place, :] = torch.where(after.isnan(), result[..., place + 1, :], after)
    return result


def _softmax_within(values: Tensor, index: Tensor, scored: Tensor, count: int) -> Tensor:
    """Softmax of the scored values of each partition."""
    lowest = torch.finfo(values.dtype).min
    held = torch.where(scored, values, lowest)
    top = values.new_full((*values.shape[:-1], count), lowest).scatter_reduce(-1, index, held, "amax")
    weights = torch.where(scored, (values - top.gather(-1, index)).exp(), 0)
    total = torch.zeros_like(top).scatter_add(-1, index, weights)
    return weights / total.gather(-1, index).clamp(min=torch.finfo(values.dtype).tiny)
