"""How many packed queries a forward may take under a memory budget."""

from __future__ import annotations

import torch

from cfkv.models.loading import LoadedModel

GIB = 2**30
CPU_BUDGET = 2 * GIB
FREE_SHARE = 0.25


def budget(loaded: LoadedModel, gibibytes: float | None) -> int:
    """Bytes for packed queries beyond weights and cache: as given, else 2 GiB or a quarter of a GPU's free memory."""
    if gibibytes is not None:
        return int(gibibytes * GIB)
    if loaded.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(loaded.device)
        return int(free * FREE_SHARE)
    return CPU_BUDGET


def entry_bytes(loaded: LoadedModel) -> int:
    """Keys and values of one token over all layers."""
    shape = loaded.shape
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * loaded.dtype.itemsize


def query_bytes(loaded: LoadedModel, keys: int) -> int:
    """What one query takes at most, an estimate: float32 logits thrice, its entries, its mask, its activations.

    `keys` is the number of entries it may look at. The eager kernel holds a score per head and key as well.
    """
    shape, size = loaded.shape, loaded.dtype.itemsize
    scores = shape.num_heads * 2 if loaded.attn_implementation == "eager" else 1
    return (
        3 * 4 * shape.vocabulary
        + entry_bytes(loaded)
        + keys * (2 + scores * size)
        + 16 * shape.hidden_size * size
    )


def queries_at_once(loaded: LoadedModel, keys: int, memory: int, most: int) -> int:
    """The largest number of queries, 1 to `most`, that `memory` bytes have room for."""
    return max(1, min(most, memory // query_bytes(loaded, keys + most)))
