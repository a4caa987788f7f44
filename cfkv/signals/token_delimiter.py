"""Control: whether a token is a delimiter."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, found, signal_kinds
from cfkv.signals._tokens import CLASSES


@signal_kinds.register
class TokenDelimiter(CausalSignal):
    """1 if its text is punctuation, or a marker such as </think>, else 0."""

    group: ClassVar[str] = "position"
    observes: ClassVar[tuple[str, ...]] = ("tokens",)
    unit: ClassVar[str] = "0 or 1"
    source: ClassVar[str] = "cfkv control"
    layered: ClassVar[bool] = False

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """No memory is needed."""
        classes = found(observation.tokens, "tokens").classes
        return (classes == CLASSES.index("delimiter"))[None], None
