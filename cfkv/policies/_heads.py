"""Query heads reduced to the KV head that they share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Reduction = Literal["mean", "max", "sum"]


def by_kv_head(rows: Tensor, kv_heads: int, how: Reduction = "mean") -> Tensor:
    """[L, H, ...] to [L, G, ...]; the query heads of one KV head are neighbours."""
    groups = rows.unflatten(1, (kv_heads, rows.shape[1] // kv_heads))
    if how == "max":
        return groups.amax(dim=2)
    return groups.sum(dim=2) if how == "sum" else groups.mean(dim=2)
