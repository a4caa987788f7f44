"""Everything that a signal may read, from one dense eager forward over the whole trace, in float64.

Nothing here comes from the package under test: hooks on the model's own modules, the attention weights that it
returns, and what its own eager kernel was called with.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfkv.models.loading import LoadedModel

Array = np.ndarray


@dataclass(frozen=True)
class Layer:
    """One block: tensors of all tokens; heads first."""

    hidden: Array
    attention_output: Array
    mlp_output: Array
    queries: Array
    keys: Array
    values: Array
    raw_keys: Array
    attention: Array  # [heads, tokens, tokens]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return len(self.queries) // len(self.keys)

    def by_kv_head(self, per_head: Array) -> Array:
        """Mean over the query heads of each KV head."""
        return per_head.reshape(len(self.keys), self.group, *per_head.shape[1:]).mean(axis=1)


@dataclass(frozen=True)
class Dense:
    """A whole trace: `embedding` [tokens, hidden], `layers`, `logits` [tokens, vocabulary]."""

    ids: list[int]
    texts: list[str]
    embedding: Array
    layers: list[Layer]
    logits: Array


def array(tensor: Tensor) -> Array:
    """float64, without the batch."""
    return tensor[0].detach().double().numpy()


@torch.no_grad()
def dense(loaded: LoadedModel, ids: Sequence[int]) -> Dense:
    """Run `loaded`, which must use the eager kernel."""
    model = loaded.model
    caught: dict[str, list[Tensor]] = {}
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def catch(name: str) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            caught.setdefault(name, []).append(output[0] if isinstance(output, tuple) else output)

        return hook

    module = sys.modules[type(model).__module__]
    kernel = module.eager_attention_forward

    def spy(own: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append((query, key, value))
        return kernel(own, query, key, value, *rest, **options)

    def catch_last(module: Any, given: Any) -> None:
        caught["last"] = [given[0]]

    handles = [model.model.norm.register_forward_pre_hook(catch_last)]
    for layer in model.model.layers:
        attention = layer.self_attn
        handles.append(attention.register_forward_hook(catch("attention")))
        handles.append(layer.mlp.register_forward_hook(catch("mlp")))
        source = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None)
        handles.append((source or attention.qkv_proj).register_forward_hook(catch("raw")))
    module.eager_attention_forward = spy
    try:
        output = model(torch.tensor([list(ids)]), output_hidden_states=True, output_attentions=True)
    finally:
        module.eager_attention_forward = kernel
        for handle in handles:
            handle.remove()
    streams = [*output.hidden_states[:-1], caught["last"][0]]
    layers = []
    for index in range(loaded.shape.num_layers):
        query, key, value = (array(tensor) for tensor in calls[index])
        layers.append(
            Layer(
                hidden=array(streams[index + 1]),
                attention_output=array(caught["attention"][index]),
                mlp_output=array(caught["mlp"][index]),
                queries=query,
                keys=key,
                values=value,
                raw_keys=raw_keys(loaded, caught["raw"][index]),
                attention=array(output.attentions[index]),
            )
        )
    texts = [loaded.tokenizer.decode([token]) for token in ids]
    return Dense(list(ids), texts, array(streams[0]), layers, array(output.logits))


def raw_keys(loaded: LoadedModel, output: Tensor) -> Array:
    """[KV heads, tokens, head_dim] of a key projection, a key norm, or Phi-3's joint projection."""
    heads, width = loaded.shape.num_kv_heads, loaded.shape.head_dim
    found = array(output)
    if found.ndim == 3:  # a norm over heads: [tokens, heads, width] or [heads, tokens, width]
        return found if len(found) == heads else found.transpose(1, 0, 2)
    if found.shape[1] > heads * width:
        start = loaded.shape.num_heads * width
        found = found[:, start : start + heads * width]
    return found.reshape(len(found), heads, width).transpose(1, 0, 2)
