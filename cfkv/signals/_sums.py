"""Sums over the tokens so far."""

from __future__ import annotations

from torch import Tensor


def running_sum(before: Tensor | None, rows: Tensor) -> Tensor:
    """Sums of `rows` [G, C, D] up to and including each token, on top of the sum `before` [G, D] of earlier ones."""
    sums = rows.cumsum(dim=1)
    return sums if before is None else sums + before[:, None]


def variance(rows: Tensor) -> Tensor:
    """Unbiased variance over the last dimension, in two passes; torch's own takes one value at a time."""
    centred = rows - rows.mean(dim=-1, keepdim=True)
    return centred.square_().sum(dim=-1) / (rows.shape[-1] - 1)
