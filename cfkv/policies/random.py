"""A frozen draw per token (methods 1.2)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Policy, Protection, View, parameters, policy_kinds
from cfkv.policies._draws import uniform


@policy_kinds.register
@parameters
class Random(Policy):
    """Keep the prompt and tokens drawn at random; a token's draw never changes."""

    frozen: ClassVar[bool] = True
    source: ClassVar[str] = "baseline"
    equation: ClassVar[str] = "s(j) ~ U(0, 1), of seed and position"

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt: the control of reasoning-time eviction."""
        return Protection(prompt=True)

    def score(self, view: View) -> Tensor:
        """The draw."""
        return uniform(view.positions, view.seed)
