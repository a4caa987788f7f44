"""Cosines between all keys, a block of rows at a time: no [tokens, tokens] matrix exists."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn.functional import normalize

# Elements of a block of cosines.
BLOCK_ELEMENTS = 2**19


def cosine_blocks(keys: Tensor, first: int = 0, *, earlier: bool = False) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, cosines [G, B, K]) of keys start..start+B-1, from `first` on, with keys 0..K-1 of `keys` [G, N, D].

    K is N; with `earlier` it is start + B, which leaves out keys after the block.
    """
    units = normalize(keys, dim=-1)
    heads, length = units.shape[:2]
    size = max(8, BLOCK_ELEMENTS // (heads * length))
    for start in range(first, length, size):
        own = units[:, start : start + size]
        others = units[:, : start + own.shape[1]] if earlier else units
        yield start, own @ others.transpose(1, 2)
