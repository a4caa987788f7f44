"""L2 change of a block's attention output from one token to the next."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.hidden_diff import HiddenDiff


@signal_kinds.register
class AttentionOutputDiff(HiddenDiff):
    """||a(t) - a(t-1)|| of what the attention module returns, before any norm that follows it; NaN at first."""

    group: ClassVar[str] = "hidden"
    observes: ClassVar[tuple[str, ...]] = ("attention_output_CE",)
    unit: ClassVar[str] = "attention output L2 norm"
    source: ClassVar[str] = "EpiKV's g_l(t) on one half of a block"
    embedding: ClassVar[bool] = False
