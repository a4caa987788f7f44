"""Packed replay: many single removals as extra queries over one shared cache.

Each candidate is a run of `horizon` queries that see the cache without their own block, and themselves. One
forward scores dozens of candidates; the literal way cuts the rows out and goes token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cfkv.models import compat
from cfkv.models.loading import LoadedModel

Block = tuple[int, int]


@torch.inference_mode()
def packed_logprobs(
    loaded: LoadedModel, cache: compat.DynamicCache, tokens: Sequence[int], blocks: Sequence[Block]
) -> Tensor:
    """Log-probabilities after each of `tokens`, once per block that is hidden.

    Parameters
    ----------
    cache : DynamicCache
        The first `step` tokens of the sequence; it is left as it is.
    tokens : sequence of int
        The next tokens of the sequence, at positions step, step + 1, ...
    blocks : sequence of (start, stop)
        Half-open spans of cached entries, one per replay; an empty one hides nothing.

    Returns
    -------
    Tensor
        float32 natural logs [blocks, tokens, vocabulary].
    """
    step, horizon, width = compat.cache_length(cache), len(tokens), len(blocks)
    device = loaded.device
    ids = torch.tensor([list(tokens) * width], device=device)
    offsets = torch.arange(horizon, device=device).repeat(width)
    owner = torch.arange(width, device=device).repeat_interleave(horizon)
    prefix = torch.arange(step, device=device)
    spans = torch.tensor(list(blocks), device=device)
    seen = (prefix[None] < spans[:, :1]) | (prefix[None] >= spans[:, 1:])
    visible = torch.cat([seen[owner], owner[:, None] == owner[None, :]], dim=1)
    positions = step + offsets
    mask = compat.masks_from_positions(
        loaded.model, positions, torch.cat([prefix, positions]), visible=visible
    )
    held = compat.map_cache(cache)
    logits = compat.forward(loaded.model, ids, held, positions=positions[None], attention_mask=mask)
    return logits[0].log_softmax(dim=-1).view(width, horizon, -1)


@torch.inference_mode()
def literal_logprobs(
    loaded: LoadedModel, cache: compat.DynamicCache, tokens: Sequence[int], block: Block
) -> Tensor:
    """As `packed_logprobs` for one block, [tokens, vocabulary]: its rows are cut out, one token goes at a time."""
    step = compat.cache_length(cache)
    keys = torch.tensor([i for i in range(step) if not block[0] <= i < block[1]], device=loaded.device)
    held = compat.map_cache(cache, slots=keys)
    found = []
    for position, token in enumerate(tokens, step):
        query = torch.tensor([position], device=loaded.device)
        keys = torch.cat([keys, query])
        mask = compat.masks_from_positions(loaded.model, query, keys)
        ids = torch.tensor([[token]], device=loaded.device)
        logits = compat.forward(loaded.model, ids, held, positions=query[None], attention_mask=mask)
        found.append(logits[0, -1].log_softmax(dim=-1))
    return torch.stack(found)


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats over the last axis of two tensors of log-probabilities, never below 0."""
    return (reference.exp() * (reference - other)).sum(dim=-1).clamp(min=0)
