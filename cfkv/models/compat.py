"""Every transformers name that has moved between releases (checked on 5.16 and 5.24).

The cache argument of `forward` is `cache` in 5.24 and `past_key_values` before; a cache layer's tensors are
sliced here and not through `crop`, whose sign convention changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

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
            here = rows.to(keys.device)  # layers may be spread over devices
            keys, values = keys[here], values[here]
        if slots is not None:
            chosen = slots.to(keys.device) if isinstance(slots, Tensor) else slots
            keys, values = keys[:, :, chosen], values[:, :, chosen]
        result.update(keys, values, index)
    return result


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


def layer_windows(model: nn.Module) -> list[int | None]:
    """The sliding window of each layer; None: it sees everything."""
    window = getattr(model.config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in layer_types(model.config)]


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


def placeholder_mask(model: nn.Module) -> Mask:
    """A mask for an attention function that reads none: handed over so that the model builds none of its own."""
    only = torch.zeros(1, dtype=torch.int64)
    return masks_from_positions(model, only, only)


def _for_kernel(config: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
    if config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


OBSERVE = "cfkv_observe"
# Options of an attention function that change its probabilities beyond a softmax over masked dot products.
UNSUPPORTED_ATTENTION = {
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks with weights of their own",
    "position_bias": "a position bias",
}
# Where such options live in an attention module, so that a model can be refused before it is run.
_UNSUPPORTED_ATTRIBUTES = {"attn_logit_softcapping": "softcap", "sinks": "s_aux"}
_PARTS = {
    "attention": ("self_attn", "attn", "attention", "self_attention", "linear_attn")
    + ("conv", "mamba", "mixer", "temporal_block", "mamba2", "ssm"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "mlp_block"),
}


def block_part(layer: nn.Module, part: str, index: int) -> nn.Module:
    """The module of a decoder block that mixes tokens (`attention`) or works on each alone (`mlp`)."""
    for name in _PARTS[part]:
        module = getattr(layer, name, None)
        if isinstance(module, nn.Module):
            return module
    children = ", ".join(name for name, _ in layer.named_children())
    raise CfkvError(
        f"layer {index} ({type(layer).__name__}) has no {part} module that cfkv knows (it has {children})"
    )


def attention_extras(model: nn.Module) -> dict[int, str]:
    """Layers whose attention has more than masked dot products, with what it has."""
    found = {}
    for index, layer in enumerate(decoder_layers(model)):
        for module in layer.modules():
            for attribute, option in _UNSUPPORTED_ATTRIBUTES.items():
                if getattr(module, attribute, None) is not None:
                    found[index] = UNSUPPORTED_ATTENTION[option]
    return found


@contextmanager
def replaced_attention(model: nn.Module, attend: Callable[..., Any]) -> Iterator[str]:
    """Let `attend` stand for the model's attention function, its own mask function kept; yields the old name.

    The mask function is registered under the new name too: without it transformers skips the masks, and padded or
    sliding-window models are silently wrong.
    """
    configurations: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    used = {key: c for key, c in configurations.items() if hasattr(c, "_attn_implementation_internal")}
    before = {key: c._attn_implementation_internal for key, c in used.items()}
    original = str(model.config._attn_implementation)  # type: ignore[union-attr]
    functions: dict[str, Any] = AttentionInterface._global_mapping
    masks: dict[str, Any] = AttentionMaskInterface._global_mapping
    if OBSERVE in functions:
        raise RuntimeError("attention is observed already; observing blocks do not nest")
    if not observable(model):
        raise CfkvError(
            f"attention implementation {original!r} cannot be observed; use --attn-implementation sdpa or eager"
        )
    AttentionInterface.register(OBSERVE, attend)
    AttentionMaskInterface.register(OBSERVE, masks[original])
    try:
        for key, configuration in used.items():
            if before[key] is not None:
                configuration._attn_implementation_internal = OBSERVE
        yield original
    finally:
        for key, configuration in used.items():
            configuration._attn_implementation_internal = before[key]
        functions.pop(OBSERVE, None)
        masks.pop(OBSERVE, None)


@contextmanager
def grouped_attention(model: nn.Module) -> Iterator[None]:
    """Let heads of a group share keys and values under a mask, on a CPU with sdpa; elsewhere nothing changes.

    transformers repeats them over the group as soon as there is a mask, a copy of three times the cache for a
    group of three. On a GPU its choice stands: there a mask with groups falls back to a slower kernel.
    """
    config: Any = model.config
    if config._attn_implementation != "sdpa" or next(model.parameters()).device.type != "cpu":
        yield
        return

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> Any:
        if (
            attention_mask is None
            or query.shape[1] == key.shape[1]
            or options.get("position_bias") is not None
        ):
            return attention_kernel(module, original)(module, query, key, value, attention_mask, **options)
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=options.get("scaling"), enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    with replaced_attention(model, attend) as original:
        yield


def unsupported_option(options: dict[str, Any]) -> str | None:
    """What an attention function's options add to a softmax over masked dot products, or None."""
    found = [what for name, what in UNSUPPORTED_ATTENTION.items() if options.get(name) is not None]
    return found[0] if found else None


def attention_kernel(module: nn.Module, name: str) -> Callable[..., Any]:
    """The attention function that a module uses under the implementation `name`."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface._global_mapping.get(name, own)  # type: ignore[return-value]


def unrotate(module: nn.Module, keys: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Keys [batch, kv_heads, tokens, head_dim] before the rotary embedding, from those after it.

    The module's own function with the opposite angle; scaled angles (YaRN) are divided out.
    """
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    scale = cosine.square() + sine.square()  # 1 but for rounding, or the squared factor of scaled angles
    return rotate(keys, keys, cosine / scale, -sine / scale)[1]


def rotate(module: nn.Module, keys: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The rotary embedding of keys [batch, kv_heads, tokens, head_dim] by angles [batch, tokens, rotated dims]."""
    return sys.modules[type(module).__module__].apply_rotary_pos_emb(keys, keys, cosine, sine)[1]


def rotary_tables(model: nn.Module, positions: int, like: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cosine and sine [positions, rotated dims] of every layer, in the dtype and on the device of `like`.

    Raises
    ------
    CfkvError
        If the decoder has no rotary embedding of its own.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model  # type: ignore[operator]
    rotary: Any = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise CfkvError(
            f"{type(model).__name__} has no rotary embedding that cfkv can call, so that keys cannot be moved to "
            "compact positions; use --positions absolute, and leave out policies that rotate their keys"
        )
    places = torch.arange(positions, device=like.device)[None]
    by_type = "layer_type" in inspect.signature(rotary.forward).parameters
    tables: dict[str, tuple[Tensor, Tensor]] = {}
    kinds = layer_types(model.config)
    for kind in kinds:
        if kind not in tables:
            cosine, sine = rotary(like, places, kind) if by_type else rotary(like, places)
            tables[kind] = cosine[0], sine[0]
    return [tables[kind] for kind in kinds]


def own_cache(model: nn.Module) -> DynamicCache:
    """The cache that the model makes itself, for a pass whose cache nobody reads.

    It serves layers that keep a state instead of keys and values; sliding layers are cut to their window.
    """
    config: Any = model.config
    return DynamicCache(config=config)


def observable(model: nn.Module) -> bool:
    """Whether the model's attention implementation has a mask function to be observed with."""
    config: Any = model.config
    return config._attn_implementation in AttentionMaskInterface._global_mapping
