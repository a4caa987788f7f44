"""EpiKV's difference under the EMA of its notes: 0.9 on the new value (methods 3.1)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Memory, parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._common import Share
from cfkv.policies._hidden import HiddenPolicy
from cfkv.policies._rolling import exponential


@policy_kinds.register
@parameters
class EpikvEma(HiddenPolicy):
    """Keep generated tokens by the difference of layers 10 and 21, EMA that is nearly raw; frozen at birth."""

    source: ClassVar[str] = f"{EPIKV}, EMA as its notes have it"
    equation: ClassVar[str] = "s(t) = m_10(t) - m_21(t), m = .9 g + .1 m before"
    smoothing: ClassVar[str] = "ema"

    newest: Share = 0.9

    def smooth(self, memory: Memory, series: Tensor) -> Tensor:
        """EMA."""
        return exponential(memory, "mean", series, self.newest)
