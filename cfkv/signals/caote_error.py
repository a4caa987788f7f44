"""How far the attention output moves when one key is evicted (CAOTE, methods 1.16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import TO_END, Observation, Signal, found, present, signal_kinds

LARGEST_SHARE = 1 - 1e-6


@dataclass
class Weights:
    """Attention of the last queries by query head, summed, [G, R, N]; then the errors [G, N]."""

    summed: Tensor | None
    errors: Tensor | None = None


@signal_kinds.register
class CaoteError(Signal):
    """a / (1 - a) * ||o - v||, a the mean attention of the last 32 queries and o its output; mean over query heads.

    Exact for one eviction: the other keys' weights are normalised again.
    """

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows", "cached_values_GND")
    unit: ClassVar[str] = "value L2 norm"
    source: ClassVar[str] = "CAOTE, on SnapKV's window"
    heads: ClassVar[bool] = True
    horizon: ClassVar[int] = TO_END
    queries: ClassVar[int] = 32

    def init(self) -> Weights:
        """The length of the trace is known with the first observation."""
        return Weights(None)

    def update(self, state: Weights, observation: Observation) -> Weights:
        """Sum the window's rows; with the last of them, compute."""
        rows = found(observation.rows, "rows")
        first = max(observation.length - self.queries - rows.start, 0)
        if rows.start + first >= rows.stop:
            return state
        own = rows.probabilities_GRBK[:, :, first:].sum(dim=2)
        if state.summed is None:
            state.summed = own.new_zeros(*own.shape[:2], observation.length)
        state.summed[..., rows.first_key : rows.stop_key] += own
        if observation.last:
            values = present(observation.cached_values_GND, "values")
            state.errors = output_errors(state.summed / min(self.queries, observation.length), values)
            state.summed = None
        return state

    def read(self, state: Weights) -> Tensor:
        """The errors."""
        return found(state.errors, "last query")


def output_errors(weights: Tensor, values: Tensor) -> Tensor:
    """Norm of the change of sum(weights * values), [G, N], from weights [G, R, N] and values [G, N, D]."""
    outputs = torch.bmm(weights, values)
    distances = torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist")
    share = weights.clamp(max=LARGEST_SHARE)
    return (share / (1 - share) * distances).mean(dim=1)
