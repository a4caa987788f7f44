"""Whole chunks of neighbouring tokens (ChunkKV, arXiv:2502.00299; methods 1.10)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, Protection, Schedule, View, parameters, policy_kinds
from cfkv.policies._budget import ranked
from cfkv.policies._common import Count, above_all, window_attention
from cfkv.policies._order import Ordered


@policy_kinds.register
@parameters
class Chunkkv(Policy):
    """Keep whole chunks of 10 tokens by the mean attention of the last 32 prompt tokens, per layer; acts once."""

    needs: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "layer"
    fills: ClassVar[bool] = False
    nested: ClassVar[bool] = False
    source: ClassVar[str] = "ChunkKV (arXiv:2502.00299)"
    equation: ClassVar[str] = (
        "s(j) = mean over j's chunk of the mean over the last 32 rows and heads of a(i, j)"
    )
    deviations: ClassVar[str] = (
        "layers do not reuse each other's chunks; what a chunk would overshoot stays unused, and a budget below one "
        "chunk keeps its newest tokens"
    )

    chunk: Count = 10
    observation: Count = 32

    @property
    def window(self) -> int:
        """The observation window."""
        return self.observation

    @property
    def schedule(self) -> Schedule:
        """After the prompt."""
        return Schedule("once")

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The window."""
        return Protection(recent=self.observation)

    def chunks(self, ordered: Ordered) -> Tensor:
        """The chunk of each ordered slot; they are counted from the first token, and the last may be short."""
        places = torch.arange(ordered.order.shape[-1], device=ordered.order.device)
        return (places // self.chunk).expand(ordered.order.shape)

    def score(self, view: View) -> Tensor:
        """Means over chunks of the tokens before the window."""
        scored = view.valid & (view.positions < view.step - self.observation)
        ordered = Ordered(view)
        inside = ordered.take(scored)
        values = ordered.take(window_attention(view, "layer")).masked_fill(~inside, 0)
        chunk = self.chunks(ordered)
        sums, sizes = (
            torch.zeros_like(values).scatter_add(-1, chunk, part) for part in (values, inside.float())
        )
        return above_all(ordered.back((sums / sizes.clamp(min=1)).gather(-1, chunk)), scored)

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """The most tokens up to `room` that end with a chunk."""
        free = view.evictable
        ordered = Ordered(view)
        # Chunks of equal scores are apart too: the later one comes first.
        best = ordered.back(self.chunks(ordered)).gather(-1, ranked(scores, free, view.positions))
        place = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
        count = free.sum(dim=-1, keepdim=True)
        ends = torch.ones_like(free)
        ends[..., :-1] = best[..., :-1] != best[..., 1:]
        fits = (ends | (place == count)) & (place <= room) & (place <= count)
        whole = torch.where(fits, place, 0).amax(dim=-1)
        return torch.where(whole > 0, whole, count[..., 0].clamp(max=room))
