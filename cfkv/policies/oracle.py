"""What the labels call important: the ceiling of every score (from the labels)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Policy, Protection, View, parameters, policy_kinds
from cfkv.policies._common import control_window


@policy_kinds.register
@parameters
class Oracle(Policy):
    """Keep the prompt, the newest tokens, and those with the largest label."""

    needs: ClassVar[tuple[str, ...]] = ("label",)
    frozen: ClassVar[bool] = True
    source: ClassVar[str] = "cfkv; label of a run"
    equation: ClassVar[str] = "s(j) = label of j; 0 where it is untested"

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt and a recent window, as the random control does: a label says what the answer needs, and not what
        the line that is being written needs."""
        return Protection(prompt=True, recent=control_window(slots, prompt_len))

    def score(self, view: View) -> Tensor:
        """The label."""
        return view["label"].float().nan_to_num(nan=0.0)
