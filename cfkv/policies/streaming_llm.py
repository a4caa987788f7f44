"""Sinks and a recent window (StreamingLLM, arXiv:2309.17453; methods 1.3)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from cfkv.policies._base import Policy, Protection, View, parameters, policy_kinds


@policy_kinds.register
@parameters
class StreamingLlm(Policy):
    """Keep the first tokens and the newest ones, at their own positions."""

    frozen: ClassVar[bool] = True
    source: ClassVar[str] = "StreamingLLM (arXiv:2309.17453)"
    equation: ClassVar[str] = "s(j) = j; the first 4 tokens are protected"
    deviations: ClassVar[str] = "keys keep their absolute positions; streaming_llm_rerotated is the original"

    sinks: int = Field(4, ge=0)

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The sinks alone: the score keeps the window."""
        return Protection(sinks=self.sinks)

    def score(self, view: View) -> Tensor:
        """The position."""
        return view.positions.float()
