"""The scale of LagKV: a vector against the per-channel range of a reference chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from cfkv.signals._sums import variance

EPSILON = 1e-9


def lag_spread(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Standard deviation (unbiased) over the channels of `rows` [..., D], scaled by the range low..high."""
    return variance((rows - low) / (high - low + EPSILON)).sqrt()


def causal_lag(memory: Tensor | None, rows: Tensor, start: int, lag: int) -> tuple[Tensor, Tensor]:
    """Spread of `rows` [G, C, D] against the chunk of `lag` tokens before their own; raw in the first chunk.

    `memory` [4, G, D] holds the range (lowest, highest) of the previous chunk and that of the current one so far.
    """
    if memory is None:
        empty = rows.new_full((rows.shape[0], rows.shape[2]), torch.inf)
        memory = torch.stack([empty, -empty, empty, -empty])
    values, place = [], 0
    while place < rows.shape[1]:
        here = start + place
        count = min(lag - here % lag, rows.shape[1] - place)
        piece = rows[:, place : place + count]
        low, high = memory[0][:, None], memory[1][:, None]
        values.append(variance(piece).sqrt() if here < lag else lag_spread(piece, low, high))
        low, high = memory[2].minimum(piece.amin(dim=1)), memory[3].maximum(piece.amax(dim=1))
        if (here + count) % lag == 0:
            empty = torch.full_like(low, torch.inf)
            memory = torch.stack([low, high, empty, -empty])
        else:
            memory = torch.stack([memory[0], memory[1], low, high])
        place += count
    return torch.cat(values, dim=-1), memory
