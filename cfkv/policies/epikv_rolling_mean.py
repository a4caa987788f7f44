"""EpiKV's HS-variance, called raw combined in its tables (methods 3.2)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Memory, parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._common import Count
from cfkv.policies._hidden import HiddenPolicy
from cfkv.policies._rolling import rolling_mean


@policy_kinds.register
@parameters
class EpikvRollingMean(HiddenPolicy):
    """Keep generated tokens around which layer 10 moves more than layer 21 (rolling mean); frozen at birth."""

    source: ClassVar[str] = f"{EPIKV}, HS-variance (raw combined)"
    equation: ClassVar[str] = "s(t) = mean64 g_10(t) - mean64 g_21(t)"
    smoothing: ClassVar[str] = "rolling_mean"

    rolling: Count = 64

    def smooth(self, memory: Memory, series: Tensor) -> Tensor:
        """Rolling mean."""
        return rolling_mean(memory, "trail", series, self.rolling)
