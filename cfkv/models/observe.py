"""Taps on a model: read, never change, always removed.

A tap gets a tensor as soon as it exists, so that nothing of size layers x tokens x hidden is held. Attention is
read through a function that is registered with transformers for the time of a `with` block; it calls the model's
own kernel, so the output is that of the model untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cfkv.errors import CfkvError
from cfkv.models import compat

EMBEDDING_LAYER = -1

# Receives the layer's index (-1 = embedding output) and its output [batch, tokens, hidden].
HiddenTap = Callable[[int, Tensor], None]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What one layer's attention was called with, before its output exists.

    queries : [batch, heads, queries, head_dim], after the rotary embedding.
    keys, values : [batch, kv_heads, keys, head_dim], the cache and the new tokens; keys rotated.
    mask : what the model hands to its kernel: None (causal), boolean (True = attend), or additive,
        [batch, 1, queries, keys].
    window : the sliding window of this layer, or None. scaling : factor of the dot products.
    beyond : what the kernel adds to a softmax over masked dot products, or None.
    rotary : cosine and sine of the new tokens [batch, queries, rotated dims], where they were asked for.
    """

    layer: int
    module: nn.Module
    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Any
    window: int | None
    scaling: float
    beyond: str | None = None
    rotary: tuple[Tensor, Tensor] | None = None


AttentionTap = Callable[[AttentionCall], None]


@contextmanager
def tapping_hidden(model: nn.Module, tap: HiddenTap) -> Iterator[None]:
    """Call `tap` with the embedding output and each block's output during every forward inside the block.

    The last block's output is taken before the final norm, which the last entry of transformers'
    `hidden_states` is not (methods 3). The taps are removed at the end, also after an exception.
    """
    layers = compat.decoder_layers(model)
    with _hooks() as handles:
        handles.append(layers[0].register_forward_pre_hook(_embedding_hook(tap), with_kwargs=True))
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_hook(_output_hook(tap, index)))
        yield


@contextmanager
def tapping_parts(model: nn.Module, part: str, tap: HiddenTap) -> Iterator[None]:
    """Call `tap` with the output of each block's `attention` or `mlp` module, before any norm that follows it."""
    with _hooks() as handles:
        for index, layer in enumerate(compat.decoder_layers(model)):
            module = compat.block_part(layer, part, index)
            handles.append(module.register_forward_hook(_output_hook(tap, index)))
        yield


@contextmanager
def observing_attention(model: nn.Module, tap: AttentionTap, *, rotary: bool = False) -> Iterator[None]:
    """Call `tap` with every layer's queries, keys and values during every forward inside the block.

    The model's own attention and mask functions do the work. Its configuration is restored and the registered
    functions are removed at the end, also after an exception.
    """
    angles: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> Any:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        scaling = options.get("scaling")
        tap(
            AttentionCall(
                layer=layer,
                module=module,
                queries=query,
                keys=key,
                values=value,
                mask=attention_mask,
                window=options.get("sliding_window"),
                scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                beyond=compat.unsupported_option(options),
                rotary=angles.pop(layer, None),
            )
        )
        return compat.attention_kernel(module, original)(module, query, key, value, attention_mask, **options)

    with tapping_rotary(model, angles) if rotary else nullcontext():
        with compat.replaced_attention(model, attend) as original:
            yield


@contextmanager
def tapping_rotary(model: nn.Module, angles: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Put the rotary angles [batch, tokens, rotated dims] of each layer's attention into `angles` as they come."""
    with _hooks() as handles:
        for index, layer in enumerate(compat.decoder_layers(model)):
            module = compat.block_part(layer, "attention", index)
            handles.append(module.register_forward_pre_hook(_rotary_hook(angles, index), with_kwargs=True))
        yield


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    """A list of hook handles that are removed at the end."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def _embedding_hook(tap: HiddenTap) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tap(EMBEDDING_LAYER, arguments[0] if arguments else keywords["hidden_states"])

    return hook


def _output_hook(tap: HiddenTap, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        tap(index, output[0] if isinstance(output, tuple) else output)

    return hook


def _rotary_hook(angles: dict[int, tuple[Tensor, Tensor]], index: int) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = keywords.get("position_embeddings", arguments[1] if len(arguments) > 1 else None)
        if not isinstance(given, tuple):
            raise CfkvError(
                f"layer {index} ({type(module).__name__}) gets no rotary angles, so that keys before the rotary "
                "embedding are undefined; leave out the group kv_prerotary"
            )
        angles[index] = given

    return hook
