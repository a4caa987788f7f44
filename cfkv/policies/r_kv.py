"""Importance less redundancy (R-KV, arXiv:2505.24133; methods 1.21)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
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
from cfkv.policies._common import Count, Kernel, Share, above_all
from cfkv.policies._redundancy import importance, repetition, shared_out


@policy_kinds.register
@parameters
class RKv(Policy):
    """Keep keys that the last 8 queries read and that no later key repeats, per KV head, every 128 tokens."""

    needs: ClassVar[tuple[str, ...]] = ("keys", "queries")
    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "R-KV (arXiv:2505.24133)"
    equation: ClassVar[str] = (
        "s(j) = lambda * maxpool7 of the mean row of softmax(max over the group of q.k) - (1 - lambda) * softmax of "
        "the mean cosine to other keys"
    )
    deviations: ClassVar[str] = (
        "a row without a duplicate exempts no key; the code exempts the first (first_column=True). lambda is the "
        "paper's; the code has .07"
    )

    weight: Share = Field(0.1, description="lambda.")
    observation: Count = 8
    kernel: Kernel = 7
    every: Count = 128
    first_column: bool = False

    @property
    def window(self) -> int:
        """The observation window."""
        return self.observation

    @property
    def schedule(self) -> Schedule:
        """Every 128 generated tokens."""
        return Schedule("every_m", self.every)

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The observation window; no sinks, no prompt."""
        return Protection(recent=self.observation)

    def score(self, view: View) -> Tensor:
        """Redundancy is among all keys, importance among those before the window."""
        read = importance(view, view["queries"], self.observation, self.kernel)
        repeated = shared_out(repetition(view, first_column=self.first_column), view.valid)
        scored = view.valid & (view.positions < view.step - self.observation)
        return above_all(self.weight * read - (1 - self.weight) * repeated, scored)
