"""Slots in the order of their tokens, for scores that look at neighbours, segments or the newest few."""

from __future__ import annotations

import torch
from torch import Tensor

from cfkv.policies._base import View

LAST = torch.iinfo(torch.int64).max


class Ordered:
    """A view's slots sorted by position, invalid ones at the end; per layer and head where they differ.

    valid : bool [l, g, S], True for the first tokens.
    """

    def __init__(self, view: View) -> None:
        self.order = view.positions.masked_fill(~view.valid, LAST).argsort(dim=-1, stable=True)
        self.valid = view.valid.gather(-1, self.order)

    def take(self, column: Tensor) -> Tensor:
        """A column [.., .., S] in order; its first axes may be larger than the table's."""
        return column.gather(-1, self.order.expand(*column.shape[:-1], -1))

    def take_vectors(self, column: Tensor) -> Tensor:
        """A column [L, G, S, D] in order."""
        return column.gather(-2, self.order[..., None].expand(*column.shape[:-2], -1, column.shape[-1]))

    def back(self, scores: Tensor) -> Tensor:
        """Values in order, put back to their slots."""
        return torch.empty_like(scores).scatter(-1, self.order.expand(scores.shape), scores)
