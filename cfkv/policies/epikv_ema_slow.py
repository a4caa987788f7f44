"""EpiKV's difference under the other reading of its EMA: 0.9 on the past (methods 3.1)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._base import parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._common import Share
from cfkv.policies.epikv_ema import EpikvEma


@policy_kinds.register
@parameters
class EpikvEmaSlow(EpikvEma):
    """Keep generated tokens by the difference of layers 10 and 21, EMA that remembers; frozen at birth."""

    source: ClassVar[str] = f"{EPIKV}, EMA as its text may be read"
    equation: ClassVar[str] = "s(t) = m_10(t) - m_21(t), m = .1 g + .9 m before"

    newest: Share = 0.1
