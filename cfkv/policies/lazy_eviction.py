"""Tokens that are due to recur (LazyEviction, arXiv:2506.15969; methods 1.22)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import (
    MaskScope,
    Policy,
    Protection,
    Schedule,
    Seen,
    State,
    View,
    parameters,
    policy_kinds,
)
from cfkv.policies._common import Count
from cfkv.policies._heads import by_kv_head


@policy_kinds.register
@parameters
class LazyEviction(Policy):
    """Keep the last 32 tokens and those read again within their usual interval, per KV head, every 32 tokens."""

    observes: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    state: ClassVar[Mapping[str, float]] = {"stamp": -1.0, "interval": 0.0}
    source: ClassVar[str] = "LazyEviction (arXiv:2506.15969)"
    equation: ClassVar[str] = (
        "s(j) = 2 sigmoid(-(t - TS_j) / MRI_j) + 2 sigmoid(-1 / MRI_j), TS: last strong read, MRI: longest gap"
    )
    deviations: ClassVar[str] = (
        "a read is strong at 1 / visible keys or more, the maximum over the group; the two terms are added"
    )

    every: Count = 32

    @property
    def schedule(self) -> Schedule:
        """Every 32 generated tokens."""
        return Schedule("every_m", self.every)

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """What came since the last time."""
        return Protection(recent=self.every)

    def observe(self, state: State, seen: Seen) -> None:
        """A strong read at t: MRI = max(MRI, t - TS), then TS = t; a token counts as read when it is written."""
        times = seen.tokens.to(torch.float32)
        state.put("stamp", seen.slots, times)
        state.put("interval", seen.slots, torch.zeros_like(times))
        rows = by_kv_head(seen["attention"], seen.slots.shape[1], "max")
        visible = seen.valid[..., None, :] & (seen.positions[..., None, :] <= seen.tokens[:, None])
        strong = visible & (rows >= 1 / visible.sum(dim=-1, keepdim=True).clamp(min=1))
        reads = torch.where(strong, times[:, None], -1.0)
        stamps = torch.cat([state.columns["stamp"][..., None, :], reads], dim=-2).cummax(dim=-2).values
        gaps = ((times[:, None] - stamps[..., :-1, :]) * strong).amax(dim=-2)
        state.columns["interval"] = torch.maximum(state.columns["interval"], gaps)
        state.columns["stamp"] = stamps[..., -1, :]

    def score(self, view: View) -> Tensor:
        """No interval yet: 1 for a token that was just read, else 0."""
        age = view.step - 1 - view.state["stamp"]
        interval = view.state["interval"]
        known = interval > 0
        safe = interval.clamp(min=1)
        recurring = 2 * torch.sigmoid(-age / safe) + 2 * torch.sigmoid(-1 / safe)
        return torch.where(known, recurring, (age == 0).float())
