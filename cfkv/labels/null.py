"""The null intervention: the shapes of occlusion with nothing replaced, which is the numerical noise floor.

Whatever a window of another kind shows below this is arithmetic: batching, chunking and the cache's rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cfkv.labels._base import LabelTrace, label_kinds
from cfkv.labels._replay import Replay, Replayed
from cfkv.labels._window_label import Span, WindowLabel


@label_kinds.register
class Null(WindowLabel):
    """Replay every window's shapes with the tokens left as they are."""

    source: ClassVar[str] = "cfkv; control of EpiKV's occlusion"
    unit: ClassVar[str] = "nats/token of the original answer"
    sign: ClassVar[str] = "either: rounding alone"

    def replay_windows(self, replay: Replay, trace: LabelTrace, spans: Sequence[Span]) -> list[Replayed]:
        """The same prefixes, suffixes and batches as occlusion of the same windows."""
        contexts = [list(trace.context) for _ in spans]
        return self.replay_contexts(replay, contexts, [start for start, _ in spans])
