"""Heavy hitters: attention received so far (H2O, arXiv:2306.14048; methods 1.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

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
from cfkv.policies._heads import by_kv_head


@policy_kinds.register
@parameters
class H2o(Policy):
    """Keep the recent half of the budget and the tokens with the most accumulated attention, per KV head."""

    observes: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    state: ClassVar[Mapping[str, float]] = {"mass": 0.0}
    source: ClassVar[str] = "H2O (arXiv:2306.14048), its LLaMA code"
    equation: ClassVar[str] = "s(j) = sum over queries i >= j and the group's query heads of a(i, j)"
    deviations: ClassVar[str] = "sizes are shares of the budget, where the code has shares of the length"

    recent_share: float = Field(0.5, ge=0, lt=1)

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The recent part is no candidate."""
        return Protection(recent=int(self.recent_share * slots))

    def observe(self, state: State, seen: Seen) -> None:
        """Add the new rows, those of the prompt included."""
        rows = by_kv_head(seen["attention"], seen.slots.shape[1], "sum")
        state.columns["mass"] += rows.sum(dim=-2)

    def score(self, view: View) -> Tensor:
        """The mass."""
        return view.state["mass"]
