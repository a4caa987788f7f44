"""Cache knockout: a window's cached entries are hidden at the boundary, the answer is regenerated.

This is what an evictor really does: the tokens were read when the reasoning was written, and are gone from the
end of the reasoning on. Positions stay as they were. It costs an answer's length, not a suffix's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cfkv.labels._base import LabelTrace, label_kinds
from cfkv.labels._replay import Replay, Replayed
from cfkv.labels._window_label import Span, WindowLabel


@label_kinds.register
class Knockout(WindowLabel):
    """Hide a window's cached entries from the end of the reasoning on and regenerate the answer."""

    source: ClassVar[str] = "cfkv; AvoKV-E's removal applied to windows"
    unit: ClassVar[str] = "nats/token of the original answer"
    sign: ClassVar[str] = "positive: evicting the entries makes the original answer less likely"

    def replay_windows(self, replay: Replay, trace: LabelTrace, spans: Sequence[Span]) -> list[Replayed]:
        """All windows share the cache of the whole reasoning."""
        start = eviction_start(trace)
        if self.execution.literal:
            return [replay.literal_masked(trace.context, start, span) for span in spans]
        return replay.masked(trace.context, start, spans)

    def replay_control(self, replay: Replay, trace: LabelTrace) -> Replayed:
        """The same shapes with nothing hidden."""
        return self.replay_windows(replay, trace, [(0, 0)])[0]


def eviction_start(trace: LabelTrace) -> int:
    """The first token that no longer sees what was evicted: the one after the reasoning, else its last."""
    return min(trace.reasoning_stop, trace.answer_start - 1)
