"""PAGE's SnapKV: one mask, no pooling (methods 1.7)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import (
    Policy,
    Protection,
    Schedule,
    View,
    parameters,
    policy_kinds,
)
from cfkv.policies._common import PAGE, window_attention


@policy_kinds.register
@parameters
class SnapkvPage(Policy):
    """Keep 4 sinks, the last 32 prompt tokens and those that they attend to most, one mask; acts once."""

    needs: ClassVar[tuple[str, ...]] = ("attention",)
    source: ClassVar[str] = "PAGE, its SnapKV"
    equation: ClassVar[str] = "s(j) = mean over the last 32 rows, layers and heads of a(i, j)"
    deviations: ClassVar[str] = "of SnapKV: one mask, no pooling, sinks"

    @property
    def window(self) -> int:
        """The observation window."""
        return PAGE.recent

    @property
    def schedule(self) -> Schedule:
        """After the prompt."""
        return Schedule("once")

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """4 sinks and the window, inside the budget."""
        return PAGE

    def score(self, view: View) -> Tensor:
        """The window's rows."""
        return window_attention(view, self.mask_scope)
