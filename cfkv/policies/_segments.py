"""Segments of cached tokens with a type and a budget each (EpiKV's adaptation of ThinKV; methods 1.19, 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from cfkv.policies._base import View
from cfkv.policies._order import Ordered

RUNGS = (64, 32, 8)  # reasoning, execution, transition


def thirds(values: Tensor) -> Tensor:
    """0, 1 or 2 for the lowest, middle and highest third of [.., m]; ties by the earlier one first."""
    ranks = values.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
    return ranks * 3 // values.shape[-1]


class Segments:
    """Blocks of `size` cached tokens in the order of their positions, from the oldest, for one global mask.

    count : how many. of : the block of each ordered slot [S]; invalid slots come after the last token.
    """

    def __init__(self, view: View, size: int) -> None:
        self.view, self.size = view, size
        self.ordered = Ordered(view)
        length = int(view.valid.sum())
        self.count = -(-length // size)
        places = torch.arange(view.positions.shape[-1], device=view.positions.device)
        self.of = (places // size).clamp(max=max(self.count - 1, 0))
        self.length = length

    def blocks(self, values: Tensor, fill: float) -> Tensor:
        """[L, H, S] by slot to [L, H, count, size], the last block filled up."""
        ordered = self.ordered.take(values)[..., : self.length]
        padded = torch.nn.functional.pad(ordered, (0, self.count * self.size - self.length), value=fill)
        return padded.unflatten(-1, (self.count, self.size))

    def means(self, values: Tensor) -> Tensor:
        """Mean of [1, 1, S] within each block, [count]."""
        sizes = self.blocks(torch.ones_like(values), 0.0).sum(dim=-1)
        return (self.blocks(values, 0.0).sum(dim=-1) / sizes)[0, 0]

    def entropies(self, row: Tensor) -> Tensor:
        """Entropy of one attention row [L, H, S] restricted to each block and renormalised, mean, [count]."""
        blocks = self.blocks(row, 0.0)
        share = blocks / blocks.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(row.dtype).tiny)
        return torch.special.entr(share).sum(dim=-1).mean(dim=(0, 1))

    def scores(self, types: Tensor, ranking: Tensor) -> Tensor:
        """Score per slot [1, 1, S]; above -valid slots: within its block's budget.

        The best RUNGS[type] unprotected tokens of each block, by `ranking` [1, 1, S], come first, the oldest
        block's before the next one's; integers in floats, so that the order is exact.
        """
        free = self.ordered.take(self.view.evictable)[0, 0]
        worth = self.ordered.take(ranking)[0, 0].masked_fill(~free, -torch.inf)
        # Later position first among equals, then by worth, empty slots last, then by block: stable sorts.
        order = torch.arange(len(free), device=free.device).flip(0)
        for key in (-worth, (~self.ordered.valid[0, 0]).to(torch.int8), self.of):
            order = order[key[order].argsort(stable=True)]
        places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        rank = places - self.of * self.size
        rungs = torch.tensor(RUNGS, device=free.device)
        within = free & (rank < rungs[types][self.of])
        scores = -(self.of * self.size + rank + (~within) * self.length).float()
        return self.ordered.back(scores[None, None])


def fitting(room: int, scores: Tensor, view: View) -> Tensor:
    """Counts [1, 1]: as many as are within their block's budget, at most `room`."""
    within = scores > -int(view.valid.sum())
    return (within & view.evictable).sum(dim=-1).clamp(max=room)
