"""Truncation (EpiKV's earlier variant): the reasoning is cut before a window and the answer regenerated.

What follows the reasoning (its closing marker and any answer prefix) stays, at the positions that it then has.
The label tracks position: early cuts remove almost everything. It is kept to show just that.
"""

from __future__ import annotations

from typing import ClassVar

from cfkv.errors import ItemError
from cfkv.labels._base import LabelTrace, TraceLength, label_kinds
from cfkv.labels._packed import Counterfactual
from cfkv.labels._window_label import Span, WindowLabel


@label_kinds.register
class Truncation(WindowLabel):
    """Cut the reasoning before a window, close it there, and regenerate the answer."""

    source: ClassVar[str] = "EpiKV (arXiv:2606.26472), the truncation variant that it warns of"
    unit: ClassVar[str] = "nats/token of the original answer"
    sign: ClassVar[str] = "positive: the reasoning before the window does not yet give the original answer"

    def counterfactual(self, trace: LabelTrace, span: Span) -> Counterfactual:
        """The closing is read at once after what precedes the window, or the last token before the cut is."""
        closing = trace.context[trace.reasoning_stop :]
        if closing:
            return Counterfactual(span[0], closing)
        if span[0] == 0:
            raise ItemError(
                "no_context",
                "the first window begins at token 0 and nothing closes the reasoning: nothing is left",
            )
        return Counterfactual(span[0] - 1, trace.context[span[0] - 1 : span[0]])

    @classmethod
    def first_changed(cls, length: TraceLength, start: int) -> int:
        """Only the closing is read again."""
        return length.reasoning_stop
