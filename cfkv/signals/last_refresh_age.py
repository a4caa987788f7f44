"""How long ago a key was last read (RaaS's timestamp, methods 1.18)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import Observation, signal_kinds
from cfkv.signals._received import PerKey, ReceivedSignal
from cfkv.signals._rows import AttentionRows


@signal_kinds.register
class LastRefreshAge(ReceivedSignal):
    """Tokens from the last query that gave the key its uniform share or more, mean over heads, to the trace's end.

    A key counts as read when it is written. The paper's threshold of 1e-4 is the uniform share 1 / visible keys of a
    10,000-token context, which suits any length.
    """

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "tokens"
    source: ClassVar[str] = "RaaS, timestamp; threshold 1/n"

    def add(self, values: Tensor, rows: AttentionRows, observation: Observation) -> None:
        """The latest reading row, counted from 1, stays."""
        rank = torch.arange(rows.start + 1, rows.stop + 1, device=values.device, dtype=values.dtype)
        read = rows.by_layer_BK >= 1 / rows.visible_B[:, None]
        own = values[0, rows.first_key : rows.stop_key]
        torch.maximum(own, (read * rank[:, None]).amax(dim=0), out=own)

    def read(self, state: PerKey) -> Tensor:
        """A key that was never read has its own position as its stamp."""
        stamps = super().read(state) - 1
        written = torch.arange(state.seen, device=stamps.device)
        return state.seen - 1 - torch.maximum(stamps, written)
