"""Oldest milestone first (RaaS, arXiv:2502.11147; methods 1.18)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from cfkv.policies._base import (
    MaskScope,
    Policy,
    Protection,
    Seen,
    State,
    View,
    parameters,
    policy_kinds,
)


@policy_kinds.register
@parameters
class Raas(Policy):
    """Evict the generated token that was last read longest ago, per layer; the prompt is kept."""

    observes: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "layer"
    state: ClassVar[Mapping[str, float]] = {"stamp": -1.0}
    source: ClassVar[str] = "RaaS (arXiv:2502.11147)"
    equation: ClassVar[str] = "s(j) = last generated token t with a(t, j) > 1e-4, mean over heads"
    deviations: ClassVar[str] = (
        "single tokens and their attention instead of pages of 16 with representative keys"
    )

    alpha: float = Field(1e-4, ge=0)

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt."""
        return Protection(prompt=True)

    def observe(self, state: State, seen: Seen) -> None:
        """New tokens have the newest stamp; rows of the prompt stamp nothing."""
        times = seen.tokens.to(torch.float32)
        state.put("stamp", seen.slots, times)
        reads = self.reads(seen) & seen.generated[:, None]
        newest = torch.where(reads, times[:, None], -1.0).amax(dim=-2)
        state.columns["stamp"] = torch.maximum(state.columns["stamp"], newest)

    def reads(self, seen: Seen) -> Tensor:
        """Whether a new token reads a slot, [l, g, C, S]."""
        return seen["attention"].mean(dim=1, keepdim=True) > self.alpha

    def score(self, view: View) -> Tensor:
        """The stamp; among equals the older token goes."""
        return view.state["stamp"]
