"""How much a token's value adds to the space that the others span (CapKV, methods 1.15)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import TO_END, Observation, Signal, found, present, signal_kinds


@dataclass
class Anchor:
    """Sum of the last queries [G, D], then the leverages [G, N]."""

    summed: Tensor | None = None
    leverages: Tensor | None = None


@signal_kinds.register
class CapkvLeverage(Signal):
    """w v' A^-1 v in [0, 1), A = I + sum(w v v'), w = exp(beta k.q / sqrt(d)), q the mean of the last 32 queries.

    Exponents are clamped at 30; a common shift of them would weigh A against I differently.
    """

    group: ClassVar[str] = "kv_pairwise"
    observes: ClassVar[tuple[str, ...]] = ("cached_keys_GND", "cached_values_GND", "queries_HCD")
    unit: ClassVar[str] = "leverage"
    source: ClassVar[str] = "CapKV, beta 5"
    heads: ClassVar[bool] = True
    horizon: ClassVar[int] = TO_END
    queries: ClassVar[int] = 32
    beta: ClassVar[float] = 5.0
    largest_exponent: ClassVar[float] = 30.0

    def init(self) -> Anchor:
        """Nothing seen."""
        return Anchor()

    def update(self, state: Anchor, observation: Observation) -> Anchor:
        """Sum the window's queries; with the last of them, solve."""
        keys = present(observation.cached_keys_GND, "keys")
        queries = present(observation.queries_HCD, "queries")
        first = max(observation.length - self.queries - observation.start, 0)
        if first < queries.shape[1]:
            grouped = queries[:, first:].unflatten(0, (keys.shape[0], -1))
            own = grouped.mean(dim=1).sum(dim=1)
            state.summed = own if state.summed is None else state.summed + own
        if observation.last:
            anchor = found(state.summed, "queries") / min(self.queries, observation.length)
            values = present(observation.cached_values_GND, "values")
            exponents = self.beta * (keys @ anchor[..., None])[..., 0] / keys.shape[-1] ** 0.5
            state.leverages = leverages(exponents.clamp(max=self.largest_exponent), values)
        return state

    def read(self, state: Anchor) -> Tensor:
        """The leverages."""
        return found(state.leverages, "last query")


def leverages(exponents: Tensor, values: Tensor) -> Tensor:
    """exp(e) v' (I + sum(exp(e) v v'))^-1 v for exponents [G, N] and values [G, N, D], in float64 where it exists."""
    precise = torch.float32 if values.device.type == "mps" else torch.float64
    scaled = values.to(precise) * (exponents.to(precise) / 2).exp()[..., None]
    matrix = torch.eye(values.shape[-1], dtype=precise, device=values.device) + scaled.mT @ scaled
    solved = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix), scaled.mT, upper=False)
    return solved.square().sum(dim=1).float()
