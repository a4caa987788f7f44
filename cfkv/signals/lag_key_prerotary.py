"""`lag_key` of the key before the rotary embedding."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.lag_key import LagKey


@signal_kinds.register
class LagKeyPrerotary(LagKey):
    """Spread on the scale of the previous chunk, of the key before it is rotated."""

    group: ClassVar[str] = "kv_prerotary"
    observes: ClassVar[tuple[str, ...]] = ("raw_keys_GCD",)
    unit: ClassVar[str] = "share of a channel's range"
    source: ClassVar[str] = "EpiKV, pre-RoPE check of Lag-key"
