"""A frozen draw per token (methods 1.2)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Policy, Protection, View, parameters, policy_kinds
from cfkv.policies._common import control_window
from cfkv.policies._draws import uniform


@policy_kinds.register
@parameters
class Random(Policy):
    """Keep the prompt, the newest tokens, and others drawn at random; a token's draw never changes."""

    frozen: ClassVar[bool] = True
    source: ClassVar[str] = "baseline"
    equation: ClassVar[str] = "s(j) ~ U(0, 1), of seed and position"

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt, and a quarter of what the budget leaves beside it, at most 128 tokens, for the newest."""
        return Protection(prompt=True, recent=control_window(slots, prompt_len))

    def score(self, view: View) -> Tensor:
        """The draw."""
        return uniform(view.positions, view.seed)
