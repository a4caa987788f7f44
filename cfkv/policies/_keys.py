"""Averages over the vectors of a cache."""

from __future__ import annotations

from torch import Tensor


def mean_vector(vectors: Tensor, valid: Tensor) -> Tensor:
    """Mean [L, G, 1, D] of [L, G, S, D] over the valid slots [l, g, S]."""
    weights = valid[..., None].to(vectors.dtype)
    total = vectors.masked_fill(~valid[..., None], 0).sum(dim=-2, keepdim=True)
    return total / weights.sum(dim=-2, keepdim=True).clamp(min=1)
