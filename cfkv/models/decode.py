"""Greedy decoding and teacher forcing. Batch 1 is the reference; a batch gives the same tokens.

Positions are always explicit: a token's rotary position is its index in its own sequence, never a cache index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.selfcheck import limits

# Says why a sequence ends after its newest token ("stop", "boxed"), or None to go on.
StopRule = Callable[[list[int]], str | None]


@dataclass
class Generation:
    """Greedily decoded tokens of one sequence.

    `logprobs` are natural logs of the model's probability of each token; `min_margin` is the smallest
    difference between the two largest logits over its steps (inf if no step was taken).
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    min_margin: float = float("inf")
    finish_reason: str = "length"


@torch.inference_mode()
def generate_greedy(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: Sequence[int],
    stops: Sequence[StopRule],
    chunk_size: int,
) -> list[Generation]:
    """Decode each prompt greedily; prompts of different length are padded on the left and masked."""
    device = loaded.device
    longest = max(len(prompt) for prompt in prompts)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    filler = loaded.tokenizer.pad_token_id or 0
    token_ids = torch.tensor(
        [[filler] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    columns = torch.arange(longest, device=device)
    mask = (columns[None] >= padding[:, None]).long() if bool(padding.any()) else None
    positions = (columns[None] - padding[:, None]).clamp(min=0)
    cache = compat.new_cache()
    logits = torch.empty(0)
    for start in range(0, longest, chunk_size):
        piece = slice(start, min(start + chunk_size, longest))
        logits = compat.forward(
            loaded.model,
            token_ids[:, piece],
            cache,
            positions=positions[:, piece],
            attention_mask=None if mask is None else mask[:, : piece.stop],
            logits_to_keep=1,
        )
    return decode_greedy(
        loaded,
        cache,
        logits[:, -1],
        next_positions=longest - padding,
        max_new_tokens=max_new_tokens,
        stops=stops,
        mask=mask,
    )


@torch.inference_mode()
def decode_greedy(
    loaded: LoadedModel,
    cache: compat.DynamicCache,
    logits: Tensor,
    *,
    next_positions: Tensor,
    max_new_tokens: Sequence[int],
    stops: Sequence[StopRule],
    mask: Tensor | None = None,
) -> list[Generation]:
    """Go on greedily from a prefilled cache.

    Parameters
    ----------
    logits : Tensor
        Logits after the last cached token, [batch, vocabulary], float32.
    next_positions : Tensor
        Position of the first new token of each row, [batch].
    mask : Tensor, optional
        1 for cached columns that hold a token of the row and 0 for padding, [batch, cached].

    Finished rows leave the batch, so that they cost nothing.
    """
    results = [Generation() for _ in stops]
    rows = list(range(len(stops)))
    while rows:
        top = logits.topk(2, dim=-1).values
        chosen = logits.argmax(dim=-1)
        logprobs = top[:, 0] - logits.logsumexp(dim=-1)
        margins = (top[:, 0] - top[:, 1]).tolist()
        going = []
        for place, (row, token, logprob) in enumerate(
            zip(rows, chosen.tolist(), logprobs.tolist(), strict=True)
        ):
            result = results[row]
            result.token_ids.append(token)
            result.logprobs.append(logprob)
            result.min_margin = min(result.min_margin, margins[place])
            reason = stops[row](result.token_ids)
            if reason is not None:
                result.finish_reason = reason
            elif len(result.token_ids) < max_new_tokens[row]:
                going.append(place)
        if not going:
            break
        if len(going) < len(rows):
            kept = torch.tensor(going, device=loaded.device)
            rows = [rows[place] for place in going]
            cache = compat.map_cache(cache, rows=kept)
            chosen, next_positions = chosen[kept], next_positions[kept]
            mask = None if mask is None else mask[kept]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        logits = compat.forward(
            loaded.model, chosen[:, None], cache, positions=next_positions[:, None], attention_mask=mask
        )[:, -1]
        next_positions = next_positions + 1
    return results


@torch.inference_mode()
def teacher_forced_logprobs(
    loaded: LoadedModel, token_ids: Sequence[int], start: int, *, chunk_size: int
) -> list[float]:
    """Log-probability in nats of each token of `token_ids[start:]` given the tokens before it (start >= 1).

    Logits exist for one chunk at a time; a model with layers that keep a state gets all tokens in one.
    """
    ids = torch.tensor([list(token_ids)], device=loaded.device)
    stateful = bool(limits(loaded))
    cache = compat.own_cache(loaded.model) if stateful else compat.new_cache()
    step = len(token_ids) if stateful else chunk_size
    found: list[float] = []
    for first in range(0, len(token_ids) - 1, step):
        stop = min(first + step, len(token_ids) - 1)
        keep = max(0, stop - max(first, start - 1))
        logits = compat.forward(loaded.model, ids[:, first:stop], cache, logits_to_keep=max(1, keep))
        if keep:
            targets = ids[0, stop - keep + 1 : stop + 1, None]
            picked = logits[0].gather(-1, targets)[:, 0] - logits[0].logsumexp(dim=-1)
            found += picked.tolist()
    return found
