"""Taps on a model's layers: read, never change, always removed.

A tap gets each block's output as soon as it exists, so that nothing of size layers x tokens x hidden is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from cfkv.models import compat

EMBEDDING_LAYER = -1

# Receives the layer's index (-1 = embedding output) and its output [batch, tokens, hidden].
HiddenTap = Callable[[int, Tensor], None]


@contextmanager
def tapping_hidden(model: nn.Module, tap: HiddenTap) -> Iterator[None]:
    """Call `tap` with the embedding output and each block's output during every forward inside the block.

    The last block's output is taken before the final norm, which the last entry of transformers'
    `hidden_states` is not (methods 3). The taps are removed at the end, also after an exception.
    """
    layers = compat.decoder_layers(model)
    handles = [layers[0].register_forward_pre_hook(_embedding_hook(tap), with_kwargs=True)]
    handles += [layer.register_forward_hook(_block_hook(tap, index)) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _embedding_hook(tap: HiddenTap) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tap(EMBEDDING_LAYER, arguments[0] if arguments else keywords["hidden_states"])

    return hook


def _block_hook(tap: HiddenTap, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        tap(index, output[0] if isinstance(output, tuple) else output)

    return hook
