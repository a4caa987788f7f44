"""Budgets shared out over the KV heads of a layer, on top of any per-head score (Ada-KV; methods 1.9)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.policies._base import (
    MaskScope,
    Policy,
    Protection,
    Schedule,
    Seen,
    State,
    View,
    make_policy,
    parameters,
)
from cfkv.policies._budget import select
from cfkv.policies._common import Share


@parameters
class AdaptivePolicy(Policy):
    """The base policy's scores, windows and schedule; only the counts per head are its own."""

    needs: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    ragged: ClassVar[bool] = True

    base: str = "snapkv"
    options: dict[str, Any] | None = Field(
        None, description="Parameters of the base; default: its own, but kernel 7 and max pooling for snapkv."
    )
    alpha: Share = 0.2
    normalise: Literal["none", "mass", "mean"] = "none"

    def __post_init__(self) -> None:
        pooled = {"kernel": 7, "pooling": "max"} if self.base == "snapkv" else {}
        base = make_policy(self.base, pooled if self.options is None else self.options)
        if base.mask_scope != "kv_head" or base.ragged:
            raise CfkvError(
                f"policy {self.name}: base {self.base!r} has no score per KV head to share a budget by; take one with "
                "mask scope kv_head that shares out nothing itself"
            )
        for attribute in ("needs", "observes", "state", "frozen", "fills"):
            object.__setattr__(self, attribute, getattr(base, attribute))
        object.__setattr__(self, "_base", base)

    @property
    def scorer(self) -> Policy:
        """The base policy."""
        found: Policy = self._base  # type: ignore[attr-defined]
        return found

    @property
    def window(self) -> int:
        """The base's."""
        return self.scorer.window

    @property
    def schedule(self) -> Schedule:
        """The base's."""
        return self.scorer.schedule

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The base's."""
        return self.scorer.protection(slots, prompt_len, step)

    def observe(self, state: State, seen: Seen) -> None:
        """The base's."""
        if self.observes:
            self.scorer.observe(state, seen)

    def score(self, view: View) -> Tensor:
        """The base's."""
        return self.scorer.score(view)

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """Counts per head whose sum in each layer is heads times `room`, or all that there is."""
        free = view.evictable
        return self.shares(min(room, scores.shape[-1]), self.comparable(scores, free, view, room), free, view)

    def comparable(self, scores: Tensor, free: Tensor, view: View, room: int) -> Tensor:
        """Scores that can be compared across heads; the order within a head stays.

        mass: times the share of the head's sum that its best `room` hold. mean: by the head's mean absolute score.
        """
        if self.normalise == "none":
            return scores
        held = scores.masked_fill(~free, 0)
        if self.normalise == "mass":
            best = select(scores, view.positions, free, torch.zeros_like(free), room)
            share = held.masked_fill(~best, 0).sum(dim=-1, keepdim=True) / held.sum(dim=-1, keepdim=True)
            return scores * share.nan_to_num(0.0)
        count = free.sum(dim=-1, keepdim=True).clamp(min=1)
        return scores / (held.abs().sum(dim=-1, keepdim=True) / count).clamp(min=1e-12)

    @abstractmethod
    def shares(self, room: int, scores: Tensor, free: Tensor, view: View) -> Tensor:
        """Counts [L, G]."""


def floor_of(share: float, room: int) -> int:
    """`share` of `room`, rounded down; 1e-9: a product such as .29 * 100 = 28.999999999999996 means 29."""
    return int(share * room + 1e-9)


def winners(scores: Tensor, free: Tensor, view: View, count: int) -> Tensor:
    """How many of a layer's best `count` candidates each head has, [L, G]."""
    flat = [tensor.flatten(1) for tensor in (scores, view.positions, free)]
    best = select(flat[0], flat[1], flat[2], torch.zeros_like(flat[2]), count)
    return best.unflatten(1, scores.shape[1:]).sum(dim=-1)


def rounded(wanted: Tensor, limits: Tensor, total: int) -> Tensor:
    """Integers [L, G] near `wanted`, none above its limit, that add up to `total` (or to all limits) per layer."""
    counts = torch.minimum(wanted.floor().long(), limits)
    goal = limits.sum(dim=-1).clamp(max=total)
    for layer in range(len(counts)):
        rest = int(goal[layer] - counts[layer].sum())
        order = (counts[layer] - wanted[layer]).argsort(stable=True).tolist()
        while rest > 0:
            for head in order:
                if rest > 0 and counts[layer, head] < limits[layer, head]:
                    counts[layer, head] += 1
                    rest -= 1
    return counts
