"""Attention probabilities, a block of query rows at a time, and the sums over them that signals share.

Axis letters: G KV heads, R query heads of one KV head, B query rows of the block, K the keys that any of them sees
(a contiguous range). Query heads of one KV head are neighbours, so that keys are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.models.observe import AttentionCall

HIDDEN_SCORE = -1e30  # finite, so that 0 * score is 0 and not NaN
BAND = 32  # the longest lookahead of the signals of early reading
NEGLIGIBLE = 0.01  # of the row's maximum (ThinKV)
# Elements of a block of probabilities: it should stay in a CPU's cache.
BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


@dataclass(eq=False)
class AttentionRows:
    """The rows start..start+B-1 of one layer's attention matrix, over the keys first_key..first_key+K-1.

    Its tensors live until the next block of rows is computed: reduce them, keep none.

    shifted_GRBK : dot products less their row's maximum, HIDDEN_SCORE where hidden.
    visible_B : keys that each row sees.
    room : memory for the probabilities, of the size of `shifted_GRBK`.
    """

    start: int
    first_key: int
    shifted_GRBK: Tensor
    visible_B: Tensor
    room: Tensor

    @property
    def stop(self) -> int:
        """One past the last query row."""
        return self.start + self.shifted_GRBK.shape[2]

    @property
    def stop_key(self) -> int:
        """One past the last key that any row sees."""
        return self.first_key + self.shifted_GRBK.shape[3]

    @cached_property
    def _normalised(self) -> tuple[Tensor, Tensor]:
        weights = torch.exp(self.shifted_GRBK, out=self.room)
        total = weights.sum(dim=-1, keepdim=True)
        return weights.mul_(total.reciprocal()), total[..., 0]

    @property
    def probabilities_GRBK(self) -> Tensor:
        """Softmax of the rows; 0 where hidden."""
        return self._normalised[0]

    @cached_property
    def largest_GRB(self) -> Tensor:
        """Largest probability of each row."""
        return self._normalised[1].reciprocal()

    @cached_property
    def entropy_GRB(self) -> Tensor:
        """Entropy of each row, nats."""
        probabilities, total = self._normalised
        return total.log() - torch.linalg.vecdot(probabilities, self.shifted_GRBK)

    @cached_property
    def sparsity_GRB(self) -> Tensor:
        """Share of the visible keys with less than 1 % of the row's maximum."""
        level = torch.log(torch.tensor(NEGLIGIBLE)).item()
        below = torch.count_nonzero(self.shifted_GRBK < level, dim=-1)
        hidden = self.shifted_GRBK.shape[-1] - self.visible_B
        return (below - hidden) / self.visible_B

    @cached_property
    def by_kv_head_GBK(self) -> Tensor:
        """Mean over the query heads of each KV head."""
        return self.probabilities_GRBK.mean(dim=1)

    @cached_property
    def by_layer_BK(self) -> Tensor:
        """Mean over all heads."""
        return self.by_kv_head_GBK.mean(dim=0)

    @cached_property
    def strongest_BK(self) -> Tensor:
        """Maximum over all heads."""
        return self.probabilities_GRBK.amax(dim=(0, 1))

    @cached_property
    def received_GK(self) -> Tensor:
        """Sum over the rows, mean over the query heads of each KV head."""
        return self.by_kv_head_GBK.sum(dim=1)

    @cached_property
    def band_keys_BO(self) -> Tensor:
        """The BAND keys before each row's own, nearest first; negative before the trace."""
        rows = torch.arange(self.start, self.stop, device=self.visible_B.device)
        return rows[:, None] - torch.arange(1, BAND + 1, device=rows.device)

    @cached_property
    def band_GBO(self) -> Tensor:
        """Attention to `band_keys_BO`, mean over the query heads of each KV head; 0 for a key that is not seen."""
        places = self.band_keys_BO - self.first_key
        index = places.clamp(min=0).expand(self.shifted_GRBK.shape[0], -1, -1)
        return self.by_kv_head_GBK.gather(2, index).masked_fill_(places < 0, 0)


@dataclass(frozen=True)
class _Block:
    """Which keys a block of rows sees: first..stop; those outside clear..clear_stop need the mask."""

    rows: slice
    first: int
    stop: int
    fringes: tuple[tuple[int, int, Tensor], ...]  # key range and its hidden places [rows, keys]
    visible: Tensor


@dataclass
class RowPlans:
    """How the rows of a chunk are cut into blocks, and the memory that all blocks share.

    The blocks are worked out once per mask and used for all layers with it. Masks are told apart by identity, so
    `forget` must be called between chunks.
    """

    query_block: int | None = None
    _plans: dict[tuple[object, ...], tuple[object, list[_Block]]] = field(default_factory=dict)
    _rooms: dict[torch.device, Tensor] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop what was worked out for the masks of a chunk."""
        self._plans.clear()

    def rooms(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Two uninitialised float32 tensors of `shape`; the same memory each time.

        Blocks differ in size: allocating each would leave holes among the cache's tensors, which grow meanwhile.
        """
        size = math.prod(shape)
        if device not in self._rooms or self._rooms[device].shape[1] < size:
            self._rooms[device] = torch.empty(2, size, dtype=torch.float32, device=device)
        first, second = self._rooms[device][:, :size]
        return first.view(shape), second.view(shape)

    def blocks(self, call: AttentionCall, first_row: int) -> list[_Block]:
        """The blocks of one call's rows from `first_row` (within the chunk) on."""
        chunk, length = call.queries.shape[2], call.keys.shape[2]
        mask = call.mask if isinstance(call.mask, Tensor) else None
        # A kernel without a mask of its own is causal, and applies the layer's window itself.
        name = id(mask) if mask is not None else ("causal", call.window)
        key = (name, chunk, length, first_row, call.queries.device)
        if key not in self._plans:
            if mask is not None:
                seen = mask[0, 0, :, :length]
                seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
            else:
                seen = _causal(chunk, length, call.window, call.queries.device)
            size = self.query_block or _block_size(call)
            starts = range(first_row, chunk, size)
            self._plans[key] = mask, [_plan(seen, start, min(start + size, chunk)) for start in starts]
        return self._plans[key][1]


def _block_size(call: AttentionCall) -> int:
    elements = BLOCK_ELEMENTS.get(call.queries.device.type, BLOCK_ELEMENTS["cuda"])
    return max(8, min(128, elements // (call.queries.shape[1] * call.keys.shape[2])))


def _causal(chunk: int, length: int, window: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(length - chunk, length, device=device)[:, None] - torch.arange(
        length, device=device
    )
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _plan(seen: Tensor, start: int, stop: int) -> _Block:
    own = seen[start:stop]
    some = own.any(dim=0).nonzero()[:, 0]
    first, last = int(some[0]), int(some[-1]) + 1
    within = own[:, first:last]
    clear = within.all(dim=0)
    # The longest run that starts at the first key which all rows see needs no mask.
    places = clear.nonzero()[:, 0]
    fringes = [(0, last - first)]
    if len(places):
        left = int(places[0])
        holes = (~clear[left:]).nonzero()[:, 0]
        right = left + int(holes[0]) if len(holes) else last - first
        fringes = [(a, b) for a, b in ((0, left), (right, last - first)) if a < b]
    masks = tuple((a, b, ~within[:, a:b]) for a, b in fringes)
    return _Block(slice(start, stop), first, last, masks, within.sum(dim=-1))


def attention_rows(call: AttentionCall, plans: RowPlans, first_row: int = 0) -> Iterator[AttentionRows]:
    """The attention of the call's rows from `first_row` on, block by block, in float32 (batch 1).

    Raises
    ------
    CfkvError
        If the layer's kernel does more than a softmax over masked dot products.
    """
    if call.beyond is not None:
        raise CfkvError(
            f"attention of layer {call.layer} has {call.beyond}, which attention signals do not compute; probe other "
            "groups: hidden, kv, logits, position"
        )
    kv_heads, length = call.keys.shape[1], call.keys.shape[2]
    chunk, width = call.queries.shape[2], call.queries.shape[3]
    queries = (call.queries[0].float() * call.scaling).view(kv_heads, -1, chunk, width)
    keys = call.keys[0].float().transpose(1, 2)
    for block in plans.blocks(call, first_row):
        own = queries[:, :, block.rows].flatten(1, 2)
        shape = (kv_heads, queries.shape[1], own.shape[1] // queries.shape[1], block.stop - block.first)
        scores, room = plans.rooms(shape, own.device)
        torch.bmm(own, keys[:, :, block.first : block.stop], out=scores.flatten(1, 2))
        for start, stop, hidden in block.fringes:
            scores[..., start:stop].masked_fill_(hidden, HIDDEN_SCORE)
        scores.sub_(scores.amax(dim=-1, keepdim=True))
        yield AttentionRows(length - chunk + block.rows.start, block.first, scores, block.visible, room)
