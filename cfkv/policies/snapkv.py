"""Attention of an observation window, pooled over neighbours (SnapKV, arXiv:2404.14469; methods 1.7)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from cfkv.policies._base import (
    MaskScope,
    Policy,
    Protection,
    Schedule,
    View,
    parameters,
    policy_kinds,
)
from cfkv.policies._common import Count, Kernel, pooled_before, window_attention


@policy_kinds.register
@parameters
class Snapkv(Policy):
    """Keep the last prompt tokens and those that they attend to, pooled over neighbours, per KV head; acts once."""

    needs: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "SnapKV (arXiv:2404.14469), its code"
    equation: ClassVar[str] = (
        "s(j) = pool over j of the mean over the last 32 rows and the group's query heads of a(i, j)"
    )
    deviations: ClassVar[str] = (
        "mean of rows where the code sums (same order); mean over a KV head's query heads"
    )

    observation: Count = 32
    kernel: Kernel = 5
    pooling: Literal["average", "max"] = "average"

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

    def score(self, view: View) -> Tensor:
        """The window's own keys take no part in the pooling."""
        rows = window_attention(view, "kv_head")
        return pooled_before(view, rows, self.observation, self.kernel, self.pooling)
