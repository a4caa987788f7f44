"""PAGE's uniform per-head rows of SnapKV (methods 1.7)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._base import MaskScope, parameters, policy_kinds
from cfkv.policies.snapkv_page import SnapkvPage


@policy_kinds.register
@parameters
class SnapkvHead(SnapkvPage):
    """PAGE's SnapKV with a mask of its own for each KV head, equal counts."""

    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "PAGE, uniform per-head ablation"
    equation: ClassVar[str] = "s(j) = mean over the last 32 rows and the group's query heads of a(i, j)"
    deviations: ClassVar[str] = "of SnapKV: no pooling, sinks"
