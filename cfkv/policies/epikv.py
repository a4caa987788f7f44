"""EpiKV, the detrended hidden-state score (arXiv:2606.26472; methods 3.2)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Memory, parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._common import Count
from cfkv.policies._hidden import HiddenPolicy
from cfkv.policies._rolling import rolling_z


@policy_kinds.register
@parameters
class Epikv(HiddenPolicy):
    """Keep generated tokens at which layer 10 moves more than usual and layer 21 less; frozen at birth."""

    source: ClassVar[str] = f"{EPIKV}, detrended"
    equation: ClassVar[str] = (
        "s(t) = z_10(t) - z_21(t); z: rolling z-score over 64 tokens of ||h_l(t) - h_l(t-1)||"
    )
    smoothing: ClassVar[str] = "rolling_z"

    rolling: Count = 64

    def smooth(self, memory: Memory, series: Tensor) -> Tensor:
        """Rolling z-score."""
        return rolling_z(memory, "trail", series, self.rolling)
