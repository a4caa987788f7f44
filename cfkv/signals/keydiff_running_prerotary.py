"""`keydiff_running` of the key before the rotary embedding."""

from __future__ import annotations

from typing import ClassVar

from cfkv.signals._base import signal_kinds
from cfkv.signals.keydiff_running import KeydiffRunning


@signal_kinds.register
class KeydiffRunningPrerotary(KeydiffRunning):
    """Cosine to the mean of the unit keys so far, of the key before it is rotated."""

    group: ClassVar[str] = "kv_prerotary"
    observes: ClassVar[tuple[str, ...]] = ("raw_keys_GCD",)
    unit: ClassVar[str] = "cosine"
    source: ClassVar[str] = "KeyDiff, pre-RoPE variant"
