"""Every transformers name that has moved between releases (checked on 5.16 and 5.24).

The cache argument of `forward` is `cache` in 5.24 and `past_key_values` before; a cache layer's tensors are
sliced here and not through `crop`, whose sign convention changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from cfkv.errors import CfkvError

Mask = Tensor | dict[str, Tensor]


def new_cache() -> DynamicCache:
    """An empty cache that keeps every token on every layer.

    Built without the model's configuration on purpose: with it, sliding layers are cut to their window and a
    key's index is no longer its position.
    """
    return DynamicCache()


def cache_length(cache: DynamicCache) -> int:
    """Tokens physically held (the same on all layers here)."""
    return int(cache.get_seq_length())


def cache_keys_values(cache: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys (after rotary embedding) and values of a layer, [batch, kv_heads, tokens, head_dim]."""
    held: Any = cache.layers[layer]
    return held.keys, held.values


def map_cache(
    cache: DynamicCache, rows: Tensor | None = None, slots: Tensor | slice | None = None
) -> DynamicCache:
    """A new cache with the chosen batch `rows` and the chosen `slots` (both default to all).

    Slicing copies nothing until the cache grows; index tensors copy.
    """
    result = new_cache()
    for index in range(len(cache.layers)):
        keys, values = cache_keys_values(cache, index)
        if rows is not None:
            keys, values = keys[rows], values[rows]
        if slots is not None:
            keys, values = keys[:, :, slots], values[:, :, slots]
        result.update(keys, values, index)
    return result


def expand_cache(cache: DynamicCache, batch: int) -> DynamicCache:
    """A cache whose single row is repeated `batch` times."""
    if cache_length(cache) == 0:
        return new_cache()
    device = cache_keys_values(cache, 0)[0].device
    return map_cache(cache, rows=torch.zeros(batch, dtype=torch.long, device=device))


def forward(
    model: nn.Module,
    token_ids: Tensor,
    cache: DynamicCache,
    *,
    positions: Tensor | None = None,
    attention_mask: Mask | None = None,
    layer_masks: Mapping[int, Mask] | None = None,
    logits_to_keep: int | Tensor = 0,
) -> Tensor:
    """Run `token_ids` [batch, tokens] on top of `cache`, which grows by them.

    Positions default to counting on from the cache's length. `layer_masks` replace the mask on the layers that
    it names. Returns float32 logits [batch, kept tokens, vocabulary]; `logits_to_keep` 0 keeps all, a tensor of
    indices keeps those tokens.
    """
    if positions is None:
        start = cache_length(cache)
        positions = torch.arange(start, start + token_ids.shape[1], device=token_ids.device)
        positions = positions.expand(token_ids.shape[0], -1)
    arguments: dict[str, Any] = {
        _cache_argument(model): cache,
        "input_ids": token_ids,
        "position_ids": positions,
        "use_cache": True,
        "logits_to_keep": logits_to_keep,
    }
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
    with _replacing_masks(model, layer_masks or {}):
        return model(**arguments).logits.float()


@contextmanager
def _replacing_masks(model: nn.Module, masks: Mapping[int, Mask]) -> Iterator[None]:
    """Hand other masks to some decoder layers; undone at the end, also after an exception."""
    types = layer_types(model.config) if masks else []
    handles = []
    for index, layer in enumerate(decoder_layers(model) if masks else ()):
        if index in masks:
            mask = masks[index]
            chosen = mask[types[index]] if isinstance(mask, dict) else mask
            handles.append(layer.register_forward_pre_hook(_mask_hook(chosen), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mask_hook(mask: Tensor) -> Callable[..., tuple[Any, dict[str, Any]]]:
    def hook(
        module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" not in keywords:
            raise CfkvError(
                f"{type(module).__name__} takes no attention_mask by name, so that its entries cannot be hidden on "
                "this layer alone; leave --layers and --kv-heads at all"
            )
        return arguments, {**keywords, "attention_mask": mask.to(keywords["attention_mask"].device)}

    return hook


def _cache_argument(model: nn.Module) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder blocks in order."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model  # type: ignore[operator]
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise CfkvError(
            f"{type(model).__name__} has no list of decoder layers; cfkv knows decoder-only language models "
            "whose decoder has `.layers`"
        )
    return list(layers)


def layer_types(config: Any) -> list[str]:
    """The kind of each layer: full_attention, sliding_attention, or another kind in the model's own word."""
    declared = getattr(config, "layer_types", None)
    if declared:
        return list(declared)
    sliding = getattr(config, "sliding_window", None) is not None and getattr(
        config, "use_sliding_window", True
    )
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def masks_from_positions(
    model: nn.Module,
    queries: Tensor,
    keys: Tensor,
    hidden: Tensor | None = None,
    visible: Tensor | None = None,
) -> Mask:
    """Attention masks from absolute positions, one per layer type where the model tells types apart.

    Parameters
    ----------
    queries, keys : Tensor
        Absolute positions [queries] and [keys].
    hidden : Tensor, optional
        Boolean [keys]; True hides a key from every query that is not the key itself.
    visible : Tensor, optional
        Boolean [queries, keys]; False hides a key from that query.

    Returns
    -------
    Mask
        [1, 1, queries, keys], boolean (True = attend), additive for the eager kernel.
    """
    config: Any = model.config
    distance = queries[:, None] - keys[None, :]
    causal = distance >= 0
    if hidden is not None:
        causal = causal & ~(hidden[None, :] & (distance > 0))
    if visible is not None:
        causal = causal & visible
    window = getattr(config, "sliding_window", None)
    kinds = {"full_attention": causal}
    if window is not None:
        kinds["sliding_attention"] = causal & (distance < window)
    prepared = {name: _for_kernel(config, mask[None, None], model.dtype) for name, mask in kinds.items()}  # type: ignore[arg-type]
    if getattr(config, "layer_types", None):
        return prepared
    return prepared[layer_types(config)[0]]


def _for_kernel(config: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
    if config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
