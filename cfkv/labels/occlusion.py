"""Window occlusion (EpiKV, methods 5.1): a window's tokens are replaced, the answer is regenerated.

A window is load-bearing if the answer changes or is not given any more; a token is important if any window
over it is. Positions, attention mask and context length stay as they were.
"""

from __future__ import annotations

from typing import ClassVar

from cfkv.answers import Matcher
from cfkv.config import Execution, LabelConfig
from cfkv.labels._base import LabelTrace, label_kinds
from cfkv.labels._packed import Counterfactual
from cfkv.labels._window_label import WINDOW_OPTIONS, Span, WindowLabel
from cfkv.models.loading import LoadedModel
from cfkv.models.tokens import replacement_id


@label_kinds.register
class Occlusion(WindowLabel):
    """Replace the tokens of a window by one token id and regenerate the answer greedily."""

    source: ClassVar[str] = "EpiKV (arXiv:2606.26472), counterfactual occlusion"
    unit: ClassVar[str] = "nats/token of the original answer"
    sign: ClassVar[str] = "positive: occluding the tokens makes the original answer less likely"
    options: ClassVar[frozenset[str]] = frozenset({*WINDOW_OPTIONS, "replacement"})

    def __init__(
        self, loaded: LoadedModel, config: LabelConfig, execution: Execution, matcher: Matcher
    ) -> None:
        super().__init__(loaded, config, execution, matcher)
        self.replacement: int = replacement_id(loaded.tokenizer, loaded.model, config.replacement)

    def counterfactual(self, trace: LabelTrace, span: Span) -> Counterfactual:
        """A window changes nothing before its start; what follows it is read again."""
        start, stop = span
        return Counterfactual(start, (*[self.replacement] * (stop - start), *trace.context[stop:]))
