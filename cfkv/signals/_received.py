"""Signals that add up what each key receives from later queries."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import TO_END, Observation, Signal, found
from cfkv.signals._rows import AttentionRows


@dataclass
class PerKey:
    """A number for each key of the trace, changed in place; the first `seen` of them exist so far."""

    values: Tensor
    seen: int = 0


class ReceivedSignal(Signal):
    """A state of one number per key, into which each block of query rows is folded."""

    observes: ClassVar[tuple[str, ...]] = ("rows",)
    horizon: ClassVar[int] = TO_END
    start: ClassVar[float] = 0.0  # of every key

    def init(self) -> PerKey | None:
        """The length of the trace is known with the first observation."""
        return None

    def update(self, state: PerKey | None, observation: Observation) -> PerKey:
        """Fold one block of rows, in place."""
        rows = found(observation.rows, "rows")
        if state is None:
            heads = rows.shifted_GRBK.shape[0] if self.heads else 1
            shape, device = (heads, observation.length), rows.shifted_GRBK.device
            state = PerKey(torch.full(shape, self.start, dtype=torch.float32, device=device))
        self.add(state.values, rows, observation)
        state.seen = rows.stop
        return state

    @abstractmethod
    def add(self, values: Tensor, rows: AttentionRows, observation: Observation) -> None:
        """Fold `rows` into `values` [G or 1, tokens of the trace], in place."""

    def read(self, state: PerKey) -> Tensor:
        """The keys so far."""
        return state.values[:, : state.seen]


def later_queries(values: Tensor) -> Tensor:
    """Number of queries at or after each key, [N]."""
    count = values.shape[1]
    return torch.arange(count, 0, -1, device=values.device)


def without_future(values: Tensor, horizon: int) -> Tensor:
    """`values` with NaN for the keys that fewer than `horizon` later tokens follow."""
    values = values.clone()
    values[:, max(values.shape[1] - horizon, 0) :] = torch.nan
    return values
