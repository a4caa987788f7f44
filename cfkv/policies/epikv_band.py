"""EpiKV's band-adaptive score (methods 3.2)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._base import parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies.epikv import Epikv


@policy_kinds.register
@parameters
class EpikvBand(Epikv):
    """Keep generated tokens by the bands 7 to 13 and 18 to 25, each averaged before its z-score; frozen at birth."""

    source: ClassVar[str] = f"{EPIKV}, band-adaptive"
    equation: ClassVar[str] = "s(t) = 1.29 z_A(t) - z_B(t), A: layers 7..13, B: layers 18..25 of 32"
    early_band: ClassVar[range] = range(7, 14)
    late_band: ClassVar[range] = range(18, 26)
    early_weight: ClassVar[float] = 1.29
