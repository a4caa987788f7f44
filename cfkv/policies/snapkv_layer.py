"""PAGE's ablation of SnapKV with a mask per layer (methods 1.7)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._base import MaskScope, parameters, policy_kinds
from cfkv.policies.snapkv_page import SnapkvPage


@policy_kinds.register
@parameters
class SnapkvLayer(SnapkvPage):
    """PAGE's SnapKV with a mask of its own in each layer."""

    mask_scope: ClassVar[MaskScope] = "layer"
    source: ClassVar[str] = "PAGE, per-layer ablation"
    equation: ClassVar[str] = "s(j) = mean over the last 32 rows and heads of a(i, j)"
    deviations: ClassVar[str] = "of SnapKV: a mask per layer, no pooling, sinks"
