"""Control: how far into the reasoning a token stands."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import TO_END, CausalSignal, Observation, found, signal_kinds


@signal_kinds.register
class ReasoningPosition(CausalSignal):
    """0 at the first token of the reasoning, 1 at the first after it; negative in the prompt."""

    group: ClassVar[str] = "position"
    observes: ClassVar[tuple[str, ...]] = ("tokens",)
    unit: ClassVar[str] = "share of the reasoning"
    source: ClassVar[str] = "cfkv control"
    layered: ClassVar[bool] = False
    horizon: ClassVar[int] = TO_END  # the length of the reasoning is known at its end

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        facts = found(observation.tokens, "tokens")
        start, stop = facts.reasoning
        places = torch.arange(observation.start, observation.stop, device=facts.ids.device)
        return (places - start)[None] / max(stop - start, 1), None
