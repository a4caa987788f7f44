"""Pieces that several policies share: windows of the studies, parameter types, reductions to a mask scope."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from cfkv.policies._base import MaskScope, Protection, View
from cfkv.policies._heads import by_kv_head
from cfkv.policies._order import Ordered

PAGE = Protection(sinks=4, recent=32)


def study_window(slots: int) -> int:
    """The EpiKV study's recency window (methods 0.1)."""
    return min(128, slots // 4)


def control_window(slots: int, prompt_len: int) -> int:
    """The recent window of controls: the study's, of what the budget leaves beside the prompt.

    So that a long prompt under a small budget leaves a control that can be run.
    """
    return study_window(max(slots - prompt_len, 0))


def prompt_and_window(slots: int) -> Protection:
    """What the EpiKV study protects."""
    return Protection(prompt=True, recent=study_window(slots))


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("a pooling kernel must be odd, so that it has a middle")
    return value


Kernel = Annotated[int, Field(ge=1), AfterValidator(_odd)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


def scoped(per_head: Tensor, scope: MaskScope, kv_heads: int) -> Tensor:
    """Mean of [L, H, S] over all that share a mask: [L, G, S], [L, 1, S] or [1, 1, S]."""
    if scope == "kv_head":
        return by_kv_head(per_head, kv_heads)
    return per_head.mean(dim=1 if scope == "layer" else (0, 1), keepdim=True)


def window_attention(view: View, scope: MaskScope) -> Tensor:
    """The view's query rows, averaged over rows and over all heads that share a mask."""
    return scoped(view["attention"].mean(dim=-2), scope, view.positions.shape[1])


def pool(values: Tensor, kernel: int, how: str) -> Tensor:
    """1-D pooling along the last axis [l, g, S], stride 1, same length; averages pad with zeros."""
    if how == "average":
        return avg_pool1d(values, kernel, stride=1, padding=kernel // 2)
    return max_pool1d(values, kernel, stride=1, padding=kernel // 2)


def pooled_before(view: View, values: Tensor, window: int, kernel: int, how: str) -> Tensor:
    """`values` pooled over neighbours in time, without the newest `window` tokens, which come first of all.

    Those are protected by every policy that calls this; their score says so where protection is not looked at.
    """
    ordered = Ordered(view)
    scored = view.valid & (view.positions < view.step - window)
    inside = ordered.take(scored.expand(values.shape))
    outside = 0.0 if how == "average" else torch.finfo(values.dtype).min
    smooth = pool(ordered.take(values).masked_fill(~inside, outside), kernel, how)
    return above_all(ordered.back(smooth), scored)


def above_all(scores: Tensor, scored: Tensor) -> Tensor:
    """Slots that are not scored get one more than the best that is."""
    lowest = torch.finfo(scores.dtype).min
    best = scores.masked_fill(~scored, lowest).amax(dim=-1, keepdim=True)
    best = torch.where(scored.any(dim=-1, keepdim=True), best, 0)
    return torch.where(scored, scores, best + 1)


def scaled_layer(layer: int, layers: int, reference: int = 32) -> int:
    """A layer of a `reference`-layer model at the same relative depth of another (methods 3.2)."""
    return min(round(layer * layers / reference), layers - 1)


def average_ranks(values: Tensor, eligible: Tensor) -> Tensor:
    """Rank from 0 of each eligible value among the eligible of its row, ties averaged; others get garbage."""
    filled = values.masked_fill(~eligible, torch.inf).contiguous()
    rising = filled.sort(dim=-1).values
    below = torch.searchsorted(rising, filled)
    through = torch.searchsorted(rising, filled, right=True)
    return (below + through - 1).to(values.dtype) / 2


def percentiles(values: Tensor, eligible: Tensor) -> Tensor:
    """Percentile rank in 0..1 among the eligible of a row, ties averaged; .5 for a single one, 0 for others."""
    count = eligible.sum(dim=-1, keepdim=True)
    ranks = average_ranks(values, eligible) / (count - 1).clamp(min=1)
    return torch.where(count > 1, ranks, 0.5).where(eligible, 0)
