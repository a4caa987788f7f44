"""How open the model's choice of a token was."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, found, signal_kinds
from cfkv.signals._shift import from_second_token


@signal_kinds.register
class PredictiveEntropy(CausalSignal):
    """Entropy of the distribution that the token was drawn from; NaN for the first token."""

    group: ClassVar[str] = "logits"
    observes: ClassVar[tuple[str, ...]] = ("logits",)
    unit: ClassVar[str] = "nats"
    source: ClassVar[str] = "cfkv control; token entropy"
    layered: ClassVar[bool] = False

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """One value per token that the chunk's rows predict."""
        return from_second_token(observation, found(observation.logits, "logits").entropy), None
