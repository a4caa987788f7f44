"""A cache in slots that are allocated once: growing copies nothing, and shrinking forgets in no time.

transformers' own cache concatenates at every forward, which copies the whole prefix for each pack of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Keys and values of some slots, one pair per layer: [batch, kv_heads, slots, head_dim].
Entries = list[tuple[Tensor, Tensor]]


class SlotLayer(DynamicLayer):
    """One layer: `keys` and `values` are views of the first slots of two buffers."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Write after the last used slot; returns views of all used slots."""
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        buffers = self._room(key_states, value_states, stop)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self._show(stop)
        return self.keys, self.values  # type: ignore[return-value]

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Use these buffers [batch, kv_heads, slots, head_dim]; their content is not looked at."""
        self.buffers, self.capacity = (keys, values), keys.shape[2]
        self.device, self.dtype = keys.device, keys.dtype
        self.is_initialized = True
        self._show(0)

    def truncate(self, length: int) -> None:
        """Forget all slots from `length` on."""
        if self.buffers is not None:
            self._show(length)

    def _show(self, length: int) -> None:
        if self.buffers is not None:
            self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)

    def _room(self, keys: Tensor, values: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        if self.buffers is None or stop > self.capacity:
            old, used = self.buffers, self.get_seq_length()
            self.capacity = max(self.capacity, stop if old is None else 2 * stop)
            fresh = [
                states.new_empty(*states.shape[:2], self.capacity, states.shape[-1])
                for states in (keys, values)
            ]
            for buffer, before in zip(fresh, old or (), strict=False):
                buffer[:, :, :used] = before[:, :, :used]
            self.buffers = (fresh[0], fresh[1])
            self.device, self.dtype = keys.device, keys.dtype
            self.is_initialized = True
            self._show(used)
        return self.buffers


class SlotCache(DynamicCache):
    """A cache of `layers` layers with room for `capacity` tokens each; it doubles when that is passed."""

    def __init__(self, layers: int, capacity: int) -> None:
        super().__init__()
        self.layers: list[Any] = [SlotLayer(capacity) for _ in range(layers)]

    def truncate(self, length: int) -> None:
        """Forget all slots from `length` on, on every layer."""
        for layer in self.layers:
            layer.truncate(length)

    def take(self, slots: Tensor) -> Entries:
        """A copy of the entries at `slots` (indices) of every layer."""
        return [
            (
                layer.keys.index_select(2, slots.to(layer.keys.device)),
                layer.values.index_select(2, slots.to(layer.keys.device)),
            )
            for layer in self.layers
        ]

    def put(self, entries: Sequence[Entries]) -> None:
        """Append copied entries, in order."""
        for index, layer in enumerate(self.layers):
            pieces = [piece[index] for piece in entries]
            layer.update(
                torch.cat([keys for keys, _ in pieces], dim=2),
                torch.cat([values for _, values in pieces], dim=2),
            )
