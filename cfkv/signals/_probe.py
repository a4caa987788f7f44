"""One teacher-forced pass over a trace, by chunks, folding every signal on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.observe import EMBEDDING_LAYER, tapping_hidden
from cfkv.signals._base import Observation, Signal

# values[signal name, layer] = float32 [heads or 1, tokens]
SignalValues = dict[tuple[str, int], np.ndarray]


@torch.inference_mode()
def probe(
    loaded: LoadedModel, token_ids: Sequence[int], signals: Sequence[Signal], *, chunk_size: int
) -> SignalValues:
    """Read `signals` off every layer for every token.

    Holds one state per (signal, layer) and the KV cache; hidden states are reduced as each block ends.
    """
    hidden = [signal for signal in signals if signal.observes == "hidden"]
    cached = [signal for signal in signals if signal.observes == "kv"]
    states: dict[tuple[str, int], Any] = {}

    def fold(signal: Signal, layer: int, observation: Observation) -> None:
        key = (signal.name, layer)
        if key not in states:
            states[key] = signal.init()
        states[key] = signal.update(states[key], observation)

    def tap(layer: int, output: Tensor) -> None:
        observation = Observation(hidden_CE=output[0])
        for signal in hidden:
            if layer != EMBEDDING_LAYER or signal.embedding:
                fold(signal, layer, observation)

    ids = torch.tensor([list(token_ids)], device=loaded.device)
    cache = compat.new_cache()
    with tapping_hidden(loaded.model, tap):
        for start in range(0, len(token_ids), chunk_size):
            piece = ids[:, start : start + chunk_size]
            compat.forward(loaded.model, piece, cache, logits_to_keep=1)
            for layer in range(loaded.shape.num_layers) if cached else ():
                keys, values = compat.cache_keys_values(cache, layer)
                observation = Observation(keys_GCD=keys[0, :, start:], values_GCD=values[0, :, start:])
                for signal in cached:
                    fold(signal, layer, observation)
    by_name = {signal.name: signal for signal in signals}
    return {(name, layer): by_name[name].read(state).cpu().numpy() for (name, layer), state in states.items()}
