"""Rows of logits, reduced to what the logit signals read, a block of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of a block of rows: the temporary tensors are of this size, not of the chunk's.
BLOCK_ELEMENTS = 2**21


@dataclass(frozen=True)
class LogitRows:
    """Numbers of the distributions that predicted some tokens, each [rows].

    surprisal : nats, -log p of the token that followed. entropy : nats.
    margin : nats, largest less second largest logit (the log of the ratio of their probabilities).
    """

    surprisal: Tensor
    entropy: Tensor
    margin: Tensor


def logit_rows(logits: Tensor, following: Tensor) -> LogitRows:
    """Reduce logits [rows, vocabulary] and the ids that followed [rows]; the logits are overwritten."""
    size = max(1, BLOCK_ELEMENTS // logits.shape[1])
    blocks = [
        _reduce(logits[start : start + size], following[start : start + size])
        for start in range(0, logits.shape[0], size)
    ]
    if not blocks:
        empty = logits.new_empty(0)
        return LogitRows(empty, empty, empty)
    surprisal, entropy, margin = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return LogitRows(surprisal, entropy, margin)


def _reduce(logits: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest, place = logits.max(dim=-1, keepdim=True)
    shifted = logits.sub_(largest)  # in place: the model's output is nobody else's
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    chosen = shifted.gather(1, following[:, None])[:, 0]
    # p = 0 where the logit is -inf: 0 * -inf is no contribution.
    terms = torch.linalg.vecdot(weights, shifted.clamp(min=torch.finfo(shifted.dtype).min))
    second = shifted.scatter_(1, place, -torch.inf).amax(dim=-1)
    return log_total - chosen, log_total - terms / total, -second
