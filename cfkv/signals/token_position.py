"""Control: where a token stands."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, found, signal_kinds


@signal_kinds.register
class TokenPosition(CausalSignal):
    """Index into the trace, the prompt's first token being 0."""

    group: ClassVar[str] = "position"
    observes: ClassVar[tuple[str, ...]] = ("tokens",)
    unit: ClassVar[str] = "tokens"
    source: ClassVar[str] = "cfkv control"
    layered: ClassVar[bool] = False

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        device = found(observation.tokens, "tokens").ids.device
        return torch.arange(observation.start, observation.stop, device=device)[None], None
