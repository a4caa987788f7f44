"""Truncation (EpiKV's earlier variant): the reasoning is cut before a window and the answer regenerated.

What follows the reasoning (its closing marker and any answer prefix) stays, at the positions that it then has.
The label tracks position: early cuts remove almost everything. It is kept to show just that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cfkv.labels._base import LabelTrace, label_kinds
from cfkv.labels._replay import Replay, Replayed
from cfkv.labels._window_label import Span, WindowLabel


@label_kinds.register
class Truncation(WindowLabel):
    """Cut the reasoning before a window, close it there, and regenerate the answer."""

    source: ClassVar[str] = "EpiKV (arXiv:2606.26472), the truncation variant that it warns of"
    unit: ClassVar[str] = "nats/token of the original answer"
    sign: ClassVar[str] = "positive: the reasoning before the window does not yet give the original answer"

    def replay_windows(self, replay: Replay, trace: LabelTrace, spans: Sequence[Span]) -> list[Replayed]:
        """Contexts differ in length, so that each is a batch of its own on the shared prefix."""
        context = list(trace.context)
        contexts = [[*context[:start], *context[trace.reasoning_stop :]] for start, _ in spans]
        return self.replay_contexts(replay, contexts, [start for start, _ in spans])
