"""L2 change of a block's MLP output from one token to the next."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.hidden_diff import HiddenDiff


@signal_kinds.register
class MlpOutputDiff(HiddenDiff):
    """||m(t) - m(t-1)|| of what the MLP returns, before any norm that follows it; NaN at first."""

    group: ClassVar[str] = "hidden"
    observes: ClassVar[tuple[str, ...]] = ("mlp_output_CE",)
    unit: ClassVar[str] = "MLP output L2 norm"
    source: ClassVar[str] = "EpiKV's g_l(t) on the other half of a block"
    embedding: ClassVar[bool] = False
