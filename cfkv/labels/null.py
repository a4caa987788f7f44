"""The null intervention: the shapes of occlusion with nothing replaced, which is the numerical noise floor.

Whatever a window of another kind shows below this is arithmetic: batching, chunking and the cache's rounding.
"""

from __future__ import annotations

from typing import ClassVar

from cfkv.labels._base import LabelTrace, label_kinds
from cfkv.labels._packed import Counterfactual
from cfkv.labels._window_label import Span, WindowLabel


@label_kinds.register
class Null(WindowLabel):
    """Replay every window's shapes with the tokens left as they are."""

    source: ClassVar[str] = "cfkv; control of EpiKV's occlusion"
    unit: ClassVar[str] = "nats/token of the original answer"
    sign: ClassVar[str] = "either: rounding alone"

    def counterfactual(self, trace: LabelTrace, span: Span) -> Counterfactual:
        """The same tokens are read again as for occlusion of the window."""
        return Counterfactual(span[0], trace.context[span[0] :])
