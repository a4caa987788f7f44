"""`key_variance` of the key before the rotary embedding."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.key_variance import KeyVariance


@signal_kinds.register
class KeyVariancePrerotary(KeyVariance):
    """Unbiased variance over the head dimension, of the key before it is rotated."""

    group: ClassVar[str] = "kv_prerotary"
    observes: ClassVar[tuple[str, ...]] = ("raw_keys_GCD",)
    unit: ClassVar[str] = "squared key units"
    source: ClassVar[str] = "EpiKV, pre-RoPE check of KV-key"
