"""The StreamingLLM of PAGE's tables: 36 prompt tokens at every budget (methods 1.3)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import Policy, Protection, Schedule, View, parameters, policy_kinds
from cfkv.policies._common import PAGE


@policy_kinds.register
@parameters
class StreamingLlm36(Policy):
    """Keep the first 4 and the last 32 prompt tokens at any budget that evicts, and all that is generated."""

    frozen: ClassVar[bool] = True
    fills: ClassVar[bool] = False
    source: ClassVar[str] = "PAGE, its StreamingLLM"
    equation: ClassVar[str] = "none: only the protected tokens stay"
    deviations: ClassVar[str] = "of StreamingLLM: not scaled by the budget, acts once"

    @property
    def schedule(self) -> Schedule:
        """After the prompt."""
        return Schedule("once")

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """4 sinks and 32 recent tokens."""
        return PAGE

    def score(self, view: View) -> Tensor:
        """The position, which selects nothing."""
        return view.positions.float()

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """Nothing beside what is protected."""
        return torch.zeros(scores.shape[:-1], dtype=torch.int64, device=scores.device)
