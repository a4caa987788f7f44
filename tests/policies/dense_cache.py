"""The same cache for formulas: float64 arrays in the order of time, attention row by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from world import HEADS, KV_HEADS, LAYERS, Table, World

Array = NDArray[np.float64]
GROUP = HEADS // KV_HEADS


def array(tensor: Tensor) -> Array:
    return tensor.double().numpy()


class Dense:
    """What a table holds. `kept[l][g]`: positions that are left, ascending; `everything`: all that were ever there."""

    def __init__(self, world: World, table: Table) -> None:
        self.step, self.prompt = table.step, world.prompt_len
        tokens = table.tokens.expand(LAYERS, KV_HEADS, -1)
        self.kept = [[np.array(sorted(t for t in row.tolist() if t >= 0)) for row in head] for head in tokens]
        self.everything = np.arange(self.step)
        self.all_keys, self.all_raw_keys = array(world.keys), array(world.raw_keys)
        self.all_values, self.queries = array(world.values), array(world.queries)
        self.hidden_diff = array(world.hidden_diff)
        self.scaling = world.scaling

    def keys(self, layer: int, head: int) -> Array:
        found: Array = self.all_keys[layer, head, self.kept[layer][head]]
        return found

    def values(self, layer: int, head: int) -> Array:
        found: Array = self.all_values[layer, head, self.kept[layer][head]]
        return found

    def logits(
        self, layer: int, query_head: int, query: int, tokens: NDArray[np.int64] | None = None
    ) -> Array:
        """Scaled dot products of one query with the keys of `tokens` (default: what is left)."""
        head = query_head // GROUP
        held = self.kept[layer][head] if tokens is None else tokens
        found: Array = (
            self.all_keys[layer, head, held] @ self.queries[layer, query_head, query] * self.scaling
        )
        return found

    def row(self, layer: int, query_head: int, query: int, tokens: NDArray[np.int64] | None = None) -> Array:
        """Attention of one query; 0 to keys that come later, and to all if nothing else is left."""
        held = self.kept[layer][query_head // GROUP] if tokens is None else tokens
        weights = np.exp(self.logits(layer, query_head, query, held)) * (held <= query)
        found: Array = weights / max(weights.sum(), 1e-300)
        return found

    def history(self, layer: int, query_head: int, query: int) -> Array:
        """The row as it was when nothing had been evicted."""
        return self.row(layer, query_head, query, self.everything)

    def per_head(self, values: Array) -> Array:
        """[L, G, all tokens] at what is left."""
        return np.array(
            [
                [values[layer, head, self.kept[layer][head]] for head in range(KV_HEADS)]
                for layer in range(LAYERS)
            ]
        )

    def group(self, head: int) -> range:
        """The query heads of a KV head."""
        return range(head * GROUP, (head + 1) * GROUP)

    def newest(self, count: int) -> range:
        """The last `count` queries."""
        return range(max(self.step - count, 0), self.step)
