"""EpiKV's hidden-state difference without smoothing (methods 3.1)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Memory, parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._hidden import HiddenPolicy


@policy_kinds.register
@parameters
class EpikvRaw(HiddenPolicy):
    """Keep generated tokens at which layer 10 moves more than layer 21; frozen at birth."""

    source: ClassVar[str] = f"{EPIKV}, raw signal"
    equation: ClassVar[str] = "s(t) = g_10(t) - g_21(t), g_l(t) = ||h_l(t) - h_l(t-1)||"
    smoothing: ClassVar[str] = "raw"

    def smooth(self, memory: Memory, series: Tensor) -> Tensor:
        """None."""
        return series
