"""`cross_head_key_variance` of the key before the rotary embedding."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.cross_head_key_variance import CrossHeadKeyVariance


@signal_kinds.register
class CrossHeadKeyVariancePrerotary(CrossHeadKeyVariance):
    """Population variance over the KV heads, of the key before it is rotated."""

    group: ClassVar[str] = "kv_prerotary"
    observes: ClassVar[tuple[str, ...]] = ("raw_keys_GCD",)
    unit: ClassVar[str] = "squared key units"
    source: ClassVar[str] = "EpiKV, pre-RoPE check"
