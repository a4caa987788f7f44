"""PAGE's H2O: summed prompt attention, one mask (methods 1.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import (
    Policy,
    Protection,
    Schedule,
    Seen,
    State,
    View,
    parameters,
    policy_kinds,
)
from cfkv.policies._common import PAGE


@policy_kinds.register
@parameters
class H2oPage(Policy):
    """Keep 4 sinks, the last 32 prompt tokens and those with the most attention from the prompt; acts once."""

    observes: ClassVar[tuple[str, ...]] = ("attention",)
    state: ClassVar[Mapping[str, float]] = {"mass": 0.0}
    source: ClassVar[str] = "PAGE, its H2O"
    equation: ClassVar[str] = "s(j) = sum over prompt rows of a(i, j), mean over layers and heads"
    deviations: ClassVar[str] = "of H2O: one mask for all heads, no recent half, acts once"

    @property
    def schedule(self) -> Schedule:
        """After the prompt."""
        return Schedule("once")

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """4 sinks and 32 recent tokens."""
        return PAGE

    def observe(self, state: State, seen: Seen) -> None:
        """Add the rows of the prompt."""
        rows = seen["attention"][:, :, ~seen.generated]
        state.columns["mass"] += rows.mean(dim=(0, 1)).sum(dim=0)

    def score(self, view: View) -> Tensor:
        """The mass."""
        return view.state["mass"]
