"""`key_centroid_distance` of the key before the rotary embedding."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.key_centroid_distance import KeyCentroidDistance


@signal_kinds.register
class KeyCentroidDistancePrerotary(KeyCentroidDistance):
    """Distance to the mean of the keys so far, of the key before it is rotated."""

    group: ClassVar[str] = "kv_prerotary"
    observes: ClassVar[tuple[str, ...]] = ("raw_keys_GCD",)
    unit: ClassVar[str] = "key L2 norm"
    source: ClassVar[str] = "ManifoldKV, pre-RoPE variant"
