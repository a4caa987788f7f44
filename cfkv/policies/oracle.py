"""What the labels call important: the ceiling of every score (from the labels)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Policy, Protection, View, parameters, policy_kinds


@policy_kinds.register
@parameters
class Oracle(Policy):
    """Keep the prompt and the tokens with the largest label."""

    needs: ClassVar[tuple[str, ...]] = ("label",)
    frozen: ClassVar[bool] = True
    source: ClassVar[str] = "cfkv; label of a run"
    equation: ClassVar[str] = "s(j) = label of j; 0 where it is untested"

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt, as the random control does."""
        return Protection(prompt=True)

    def score(self, view: View) -> Tensor:
        """The label."""
        return view["label"].float().nan_to_num(nan=0.0)
