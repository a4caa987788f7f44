"""R-KV's two terms: what a window of queries reads, and how much a key repeats later ones (methods 1.21)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfkv.policies._base import View
from cfkv.policies._common import pool
from cfkv.policies._heads import by_kv_head
from cfkv.policies._order import Ordered

DUPLICATE = 0.5  # cosine above which a later key exempts itself


def importance(view: View, queries: Tensor, window: int, kernel: int) -> Tensor:
    """[L, G, S]: softmax over the keys before the window of the group's largest logit, mean of rows, max pool."""
    keys = view["keys"].float()
    kv_heads = keys.shape[1]
    queries = queries.float().unflatten(1, (kv_heads, queries.shape[1] // kv_heads))
    logits = torch.einsum("lgrwd,lgsd->lgrws", queries, keys).amax(dim=2) * view.scaling
    scored = (view.valid & (view.positions < view.step - window)).expand(keys.shape[:-1])
    hidden = ~scored[:, :, None]
    rows = logits.masked_fill(hidden, torch.finfo(logits.dtype).min).softmax(dim=-1).masked_fill(hidden, 0)
    ordered = Ordered(view)
    smooth = ordered.back(pool(ordered.take(rows.mean(dim=-2)), kernel, "max"))
    return smooth.masked_fill(~scored, 0)


def repetition(view: View, *, first_column: bool = False) -> Tensor:
    """[L, G, S]: mean cosine of each key to all others, but for rows whose newest duplicate it is.

    first_column : where a row has no duplicate, exempt the oldest key from it, as the authors' code does.
    """
    keys = normalize(view["keys"].float(), dim=-1, eps=1e-8)
    valid = view.valid.expand(keys.shape[:-1])
    positions = view.positions.expand(keys.shape[:-1])
    # A layer at a time: the matrices are slots x slots.
    return torch.stack(
        [
            _column_means(*parts, first_column=first_column)
            for parts in zip(keys, positions, valid, strict=True)
        ]
    )


def _column_means(keys: Tensor, positions: Tensor, valid: Tensor, *, first_column: bool) -> Tensor:
    cosines = keys @ keys.transpose(-1, -2)
    cosines = cosines.masked_fill(~(valid[:, None, :] & valid[:, :, None]), 0)
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    times = torch.where(cosines > DUPLICATE, positions[:, None, :], -1)
    newest, column = times.max(dim=-1, keepdim=True)
    if first_column:
        oldest = positions.masked_fill(~valid, torch.iinfo(positions.dtype).max).argmin(dim=-1)
        column = torch.where(newest < 0, oldest[:, None, None], column)
        cosines.scatter_(-1, column, 0.0)
    else:
        kept = cosines.gather(-1, column)
        cosines.scatter_(-1, column, torch.where(newest < 0, kept, 0.0))
    return cosines.sum(dim=-2) / valid.sum(dim=-1, keepdim=True)


def shared_out(values: Tensor, valid: Tensor) -> Tensor:
    """Softmax over the valid slots; 0 elsewhere."""
    filled = values.masked_fill(~valid, torch.finfo(values.dtype).min)
    return filled.softmax(dim=-1).masked_fill(~valid, 0)


def group_rows(view: View) -> Tensor:
    """The view's attention rows [L, G, W, S], mean over the query heads of each KV head."""
    return by_kv_head(view["attention"], view.positions.shape[1])
