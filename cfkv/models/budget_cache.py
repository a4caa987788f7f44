"""The cache under a budget: a table of slots that is allocated once, for many sequences at a time.

A new token overwrites a slot that was freed; nothing is concatenated, gathered or copied per step. Positions are a
column of the table: a slot's index says nothing about time. Each sequence (a row) may have other slots in use, on
each layer and KV head.

Axis letters: L layers, R rows, G KV heads, H query heads, S slots, D head dim, W query rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from cfkv.errors import CfkvError
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.observe import tapping_hidden, tapping_rotary
from cfkv.models.selfcheck import limits, number_ranges


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What is read off each step beside keys and values.

    probabilities : attention of the new token. queries : how many of the newest queries are kept. raw : keys before
    the rotary embedding. hidden : ||h(t) - h(t-1)|| of each block's output.
    """

    probabilities: bool = False
    queries: int = 0
    raw: bool = False
    hidden: bool = False


def check_evictable(loaded: LoadedModel) -> None:
    """Raise CfkvError for a model whose cache cannot be run under a budget."""
    if reasons := limits(loaded):
        raise CfkvError(f"{loaded.name} cannot be run under a budget: {reasons[0]}")
    if extras := compat.attention_extras(loaded.model):
        what = ", ".join(sorted(set(extras.values())))
        raise CfkvError(
            f"{loaded.name} cannot be run under a budget: attention of layers {number_ranges(sorted(extras))} has "
            f"{what}, which the cache does not compute"
        )
    devices = {parameter.device for parameter in loaded.model.parameters()}
    if len(devices) > 1:
        raise CfkvError(
            f"{loaded.name} is spread over {len(devices)} devices, and the cache under a budget lies on one; leave out "
            "--device-map, or take a smaller model"
        )


class _Layer(DynamicLayer):
    """One layer, as transformers sees it."""

    def __init__(self, table: BudgetCache, index: int) -> None:
        super().__init__()
        self.table, self.index = table, index
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        return self.table.write(self.index, key_states, value_states)

    def get_seq_length(self, *arguments: Any, **keywords: Any) -> int:
        return self.table.used


class BudgetCache(DynamicCache):
    """`slots` slots for each of `rows` sequences, in all layers.

    keys, values : [L, R, G, S, D], keys after the rotary embedding. raw : keys before it, or None.
    positions int64, valid bool : [L, R, G, S]; where not valid, all columns hold garbage.
    used : slots that were ever used; those behind are left out of every product.
    new_keys, new_values, new_raw : of the newest token, [L, R, G, D]. probabilities : [L, R, H, S] of the newest
    token. hidden_diff : [L, R].
    """

    def __init__(self, loaded: LoadedModel, rows: int, slots: int, reads: Reads) -> None:
        super().__init__()
        check_evictable(loaded)
        shape, device = loaded.shape, loaded.device
        self.model, self.reads = loaded.model, reads
        self.layers: list[Any] = [_Layer(self, index) for index in range(shape.num_layers)]
        table = (shape.num_layers, rows, shape.num_kv_heads, slots)

        def room(*sizes: int, dtype: torch.dtype = loaded.dtype) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        self.keys, self.values = (room(*table, shape.head_dim) for _ in range(2))
        self.raw = room(*table, shape.head_dim) if reads.raw else None
        self.positions = room(*table, dtype=torch.int64)
        self.valid = room(*table, dtype=torch.bool)
        self.used = 0
        per_token = (shape.num_layers, rows, shape.num_kv_heads, shape.head_dim)
        self.new_keys, self.new_values = room(*per_token), room(*per_token)
        self.new_raw = room(*per_token) if reads.raw else None
        heads = (shape.num_layers, rows, shape.num_heads)
        self.probabilities = room(*heads, slots, dtype=torch.float32) if reads.probabilities else None
        self.queries = room(*heads, reads.queries, shape.head_dim) if reads.queries else None
        self.newest, self.held = (
            0,
            [0] * rows,
        )  # the ring of queries: where the next one goes, how many there are
        self.hidden = room(shape.num_layers, rows, shape.hidden_size) if reads.hidden else None
        self.hidden_diff = room(shape.num_layers, rows, dtype=torch.float32)
        self.windows = compat.layer_windows(loaded.model)
        self.scaling = [0.0] * shape.num_layers
        self._targets = room(*table[:3], dtype=torch.int64)
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: list[Tensor | None] = []

    @property
    def rows(self) -> int:
        """Sequences in the table."""
        return self.valid.shape[1]

    def bytes_per_slot(self) -> int:
        """Bytes of keys and values that one slot of one row takes in all layers and KV heads."""
        layers, _, kv_heads, _, width = self.keys.shape
        return 2 * layers * kv_heads * width * self.keys.element_size()

    def load(
        self,
        row: int,
        *,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        raw: Tensor | None = None,
        queries: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        """Fill the first slots of a row: keys, values [L, G, N, D], positions broadcast to [L, G, N].

        queries : the newest ones, oldest first, [L, H, up to W, D]. hidden : the last token's, [L, hidden].
        """
        count = keys.shape[2]
        self.keys[:, row, :, :count] = keys
        self.values[:, row, :, :count] = values
        if self.raw is not None and raw is not None:
            self.raw[:, row, :, :count] = raw
        self.positions[:, row, :, :count] = positions
        self.valid[:, row, :, :count] = True
        self.used = max(self.used, count)
        if self.queries is not None and queries is not None:
            held = min(queries.shape[2], self.queries.shape[3])
            places = (self.newest - held + torch.arange(held, device=queries.device)) % self.queries.shape[3]
            self.queries[:, row, :, places] = queries[:, :, queries.shape[2] - held :]
            self.held[row] = held
        if self.hidden is not None and hidden is not None:
            self.hidden[:, row] = hidden

    def begin(self, slots: Tensor, positions: Tensor) -> None:
        """Say where the next token of each row goes, [L, R, G], and its absolute positions, [R]."""
        self._targets = slots
        self.valid.scatter_(3, slots[..., None], True)  # noqa: FBT003
        self.positions.scatter_(3, slots[..., None], positions[None, :, None, None].expand(*slots.shape, 1))
        self.used = max(self.used, int(slots.max()) + 1)
        self._masks = self._visible(positions)

    def _visible(self, now: Tensor) -> list[Tensor | None]:
        """Additive masks [R, G, 1, used] of each layer; None: every slot is seen."""
        valid = self.valid[..., : self.used]
        whole = bool(valid.all())
        additive = None if whole else self._additive(valid)
        masks: list[Tensor | None] = []
        for layer, window in enumerate(self.windows):
            if window is None:
                masks.append(None if additive is None else additive[layer][:, :, None])
                continue
            near = now[:, None, None] - self.positions[layer, ..., : self.used] < window
            masks.append(self._additive(valid[layer] & near)[:, :, None])
        return masks

    def _additive(self, seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape, dtype=self.keys.dtype, device=seen.device).masked_fill_(
            ~seen, -torch.inf
        )

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new token [R, G, 1, D] into its slots; returns the layer's slots."""
        place = self._targets[layer][..., None, None].expand(-1, -1, 1, keys.shape[-1])
        self.keys[layer].scatter_(2, place, keys)
        self.values[layer].scatter_(2, place, values)
        self.new_keys[layer], self.new_values[layer] = keys[:, :, 0], values[:, :, 0]
        if self.raw is not None and self.new_raw is not None:
            raw = compat.unrotate(self._module(layer), keys, *self._angles.pop(layer))
            self.raw[layer].scatter_(2, place, raw)
            self.new_raw[layer] = raw[:, :, 0]
        return self.keys[layer][:, :, : self.used], self.values[layer][:, :, : self.used]

    def _module(self, layer: int) -> nn.Module:
        return compat.block_part(compat.decoder_layers(self.model)[layer], "attention", layer)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """The attention function of one step: query heads of a KV head are rows of one product."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        rows, heads, _, width = query.shape
        scaling = options.get("scaling")
        scaling = width**-0.5 if scaling is None else float(scaling)
        self.scaling[layer] = scaling
        if self.queries is not None:
            self.queries[layer, :, :, self.newest] = query[:, :, 0]
        grouped = query.reshape(rows, key.shape[1], -1, width)
        seen = self._masks[layer]
        if self.probabilities is None:
            output = nn.functional.scaled_dot_product_attention(
                grouped, key, value, attn_mask=seen, scale=scaling
            )
        else:
            logits = torch.matmul(grouped * scaling, key.transpose(-1, -2))
            if seen is not None:
                logits += seen
            weights = logits.float().softmax(dim=-1)
            self.probabilities[layer, :, :, : self.used] = weights.view(rows, heads, -1)
            output = torch.matmul(weights.to(value.dtype), value)
        return output.reshape(rows, 1, heads, width), None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model read and write this table; its own functions are put back at the end."""
        with ExitStack() as stack:
            if self.raw is not None:
                stack.enter_context(tapping_rotary(self.model, self._angles))
            if self.reads.hidden:
                stack.enter_context(tapping_hidden(self.model, self._hidden_tap))
            stack.enter_context(compat.replaced_attention(self.model, self.attend))
            yield

    def _hidden_tap(self, layer: int, output: Tensor) -> None:
        if layer >= 0 and self.hidden is not None:
            new = output[:, -1]
            self.hidden_diff[layer] = (new - self.hidden[layer]).float().norm(dim=-1)
            self.hidden[layer] = new

    def step(self, tokens: Tensor, slots: Tensor, positions: Tensor, rotary: Tensor) -> Tensor:
        """Forward one token of each row, inside `attached`: logits [R, vocabulary].

        tokens, positions (absolute), rotary (what the rotary embedding is told) : [R]. slots : [L, R, G].
        """
        self.begin(slots, positions)
        logits = compat.forward(
            self.model,
            tokens[:, None],
            self,
            positions=rotary[:, None],
            attention_mask=compat.placeholder_mask(self.model),
            logits_to_keep=1,
        )[:, -1]
        if self.queries is not None:
            width = self.queries.shape[3]
            self.newest = (self.newest + 1) % width
            self.held = [min(held + 1, width) for held in self.held]
        return logits

    def newest_queries(self, row: int, count: int) -> Tensor:
        """The newest `count` queries of a row (fewer if there are fewer), oldest first: [L, H, W, D]."""
        if self.queries is None:
            raise RuntimeError("queries are not kept")
        count = min(count, self.held[row])
        places = (self.newest - count + torch.arange(count, device=self.queries.device)) % self.queries.shape[
            3
        ]
        return self.queries[:, row][:, :, places]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows: the others' memory is given back."""
        chosen = torch.tensor(list(rows), device=self.keys.device)
        self.used = int(self.valid[:, chosen].any(dim=0).any(dim=0).any(dim=0).nonzero().max()) + 1
        for name in ("keys", "values", "raw", "positions", "valid", "new_keys", "new_values", "new_raw"):
            self._select(name, chosen)
        for name in ("probabilities", "queries", "hidden", "hidden_diff"):
            self._select(name, chosen)
        if self.probabilities is not None:  # `attend` writes the used slots alone
            self.probabilities[..., self.used :] = 0
        self.held = [self.held[row] for row in rows]

    def _select(self, name: str, chosen: Tensor) -> None:
        tensor = getattr(self, name)
        if tensor is not None:
            setattr(self, name, tensor.index_select(1, chosen))

    def rotate_again(self, row: int, ranks: Tensor, tables: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Move a row's keys to the rotary positions `ranks` [L, G, S], by the angles of `compat.rotary_tables`."""
        if self.raw is None:
            raise RuntimeError("keys before the rotary embedding are not kept")
        for layer, (cosine, sine) in enumerate(tables):
            moved = compat.rotate(
                self._module(layer), self.raw[layer, row][:, None], cosine[ranks[layer]], sine[ranks[layer]]
            )
            self.keys[layer, row] = moved[:, 0]


def softmax_rows(
    queries: Tensor,
    times: Tensor,
    keys: Tensor,
    positions: Tensor,
    valid: Tensor,
    *,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """Attention of one layer, [H, W, S] in float32, of queries [H, W, D] at positions `times` [W].

    keys : [G, S, D]. positions, valid : broadcast to [G, S]. 0 where a key is invalid, later than the query or out
    of the layer's window.
    """
    heads, rows, width = queries.shape
    kv_heads, slots = keys.shape[:2]
    grouped = (queries.float() * scaling).reshape(kv_heads, -1, width)
    logits = (grouped @ keys.float().transpose(-1, -2)).view(kv_heads, -1, rows, slots)
    distance = times[:, None] - positions[..., None, :]
    seen = valid[..., None, :] & (distance >= 0)
    if window is not None:
        seen &= distance < window
    logits = logits.masked_fill_(~seen[:, None], -torch.inf)
    return logits.softmax(dim=-1).nan_to_num_(0.0).view(heads, rows, slots)
