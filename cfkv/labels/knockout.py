"""Cache knockout: a window's cached entries are hidden at the boundary, the answer is regenerated.

This is what an evictor really does: the tokens were read when the reasoning was written, and are gone from the
end of the reasoning on. Positions stay as they were. It costs an answer's length, not a suffix's.
"""

from __future__ import annotations

from typing import ClassVar

from cfkv.labels._base import LabelTrace, TraceLength, label_kinds
from cfkv.labels._packed import Counterfactual
from cfkv.labels._window_label import WINDOW_OPTIONS, Span, WindowLabel


@label_kinds.register
class Knockout(WindowLabel):
    """Hide a window's cached entries from the end of the reasoning on and regenerate the answer."""

    source: ClassVar[str] = "cfkv; AvoKV-E's removal applied to windows"
    unit: ClassVar[str] = "nats/token of the original answer"
    sign: ClassVar[str] = "positive: evicting the entries makes the original answer less likely"
    options: ClassVar[frozenset[str]] = frozenset({*WINDOW_OPTIONS, "layers", "kv_heads"})

    def counterfactual(self, trace: LabelTrace, span: Span) -> Counterfactual:
        """The window is hidden from everything after the reasoning."""
        start = eviction_start(trace)
        return Counterfactual(start, trace.context[start:], (span,))

    def control(self, trace: LabelTrace) -> Counterfactual:
        """The same shapes with nothing hidden."""
        start = eviction_start(trace)
        return Counterfactual(start, trace.context[start:])

    @classmethod
    def first_changed(cls, length: TraceLength, start: int) -> int:
        """Only what follows the reasoning is read again."""
        return min(length.reasoning_stop, length.answer_start - 1)


def eviction_start(trace: LabelTrace) -> int:
    """The first token that no longer sees what was evicted: the one after the reasoning, else its last."""
    return min(trace.reasoning_stop, trace.answer_start - 1)
