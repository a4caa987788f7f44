"""The attention of an input's last queries, in one pass or two (methods 4, 1.7), reduced layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.observe import AttentionCall, observing_attention
from cfkv.signals._agreement import LayerAgreement, head_pairs, layer_agreement
from cfkv.signals._rows import RowPlans, attention_rows


class _LastRows:
    """Sums the last query rows of each layer, and reduces them when the last one was seen."""

    def __init__(
        self, tokens: int, queries: int, top: int, stride: int, pairs: int | None, seed: int
    ) -> None:
        self.tokens, self.queries, self.top, self.stride = tokens, min(queries, tokens), top, stride
        self.pairs, self.seed = pairs, seed
        self.plans = RowPlans()
        self.sums: dict[int, Tensor] = {}
        self.layers: dict[int, LayerAgreement] = {}

    def tap(self, call: AttentionCall) -> None:
        """Only the layers that are sampled, and only the rows of the window, are computed."""
        length, heads = call.keys.shape[2], call.queries.shape[1]
        first = self.tokens - self.queries - (length - call.queries.shape[2])
        if call.layer % self.stride or first >= call.queries.shape[2]:
            return
        if call.layer not in self.sums:
            self.sums[call.layer] = torch.zeros(heads, self.tokens, device=call.queries.device)
        for rows in attention_rows(call, self.plans, max(first, 0)):
            own = rows.probabilities_GRBK.sum(dim=2).flatten(0, 1)
            self.sums[call.layer][:, rows.first_key : rows.stop_key] += own
        if length == self.tokens:
            mean = self.sums.pop(call.layer) / self.queries
            pairs = head_pairs(heads, self.pairs, (self.seed, call.layer))
            self.layers[call.layer] = layer_agreement(mean, call.keys[0], pairs, self.top)


@torch.inference_mode()
def agreement_profile(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    *,
    queries: int = 32,
    top: int = 32,
    stride: int = 1,
    pairs: int | None = None,
    seed: int = 0,
    two_pass: bool = False,
    chunk_size: int = 512,
    cache: Any = None,
) -> dict[int, LayerAgreement]:
    """The heads' agreement by layer, from the mean attention of the last `queries` rows.

    Parameters
    ----------
    queries, top : rows of the window (w), and size of a head's set (k).
    stride : every n-th layer. pairs : head pairs drawn per layer, default all.
    two_pass : prefill with the model's kernel untouched, cut the window off the cache, and forward it once more
        under observation; otherwise the prefill itself is observed. Both give the same rows.
    cache : what an untouched prefill of `token_ids` left, for the second pass alone; it is not changed.
    """
    ids = torch.tensor([list(token_ids)], device=loaded.device)
    tokens = ids.shape[1]
    last = _LastRows(tokens, queries, top, stride, pairs, seed)
    start, held = 0, compat.new_cache()
    if two_pass or cache is not None:
        whole = cache
        if whole is None:
            whole = compat.new_cache()
            _prefill(loaded, ids, whole, 0, chunk_size)
        start = tokens - last.queries
        if start:
            held = compat.map_cache(whole, slots=slice(0, start))
    with observing_attention(loaded.model, last.tap):
        _prefill(loaded, ids, held, start, chunk_size, last)
    return dict(sorted(last.layers.items()))


def _prefill(
    loaded: LoadedModel, ids: Tensor, cache: Any, start: int, chunk_size: int, last: _LastRows | None = None
) -> None:
    for place in range(start, ids.shape[1], chunk_size):
        if last is not None:
            last.plans.forget()
        compat.forward(loaded.model, ids[:, place : place + chunk_size], cache, logits_to_keep=1)
