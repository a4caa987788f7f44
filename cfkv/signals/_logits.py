"""Rows of logits, reduced to what the logit signals read, a block of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of a block of rows: the temporary tensors are of this size, not of the chunk's.
BLOCK_ELEMENTS = 2**19
GROUP = 256


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
    first, second = two_largest(logits)
    # In place: the model's output is nobody else's. Where the largest is 0, sums of p * logit do not cancel.
    shifted = logits.sub_(first[:, None])
    probabilities = shifted.softmax(dim=-1)
    log_total = -probabilities.amax(dim=-1).log()  # the likeliest token has probability exp(0) / total
    mean = torch.linalg.vecdot(probabilities, shifted)
    if mean.isnan().any():  # a logit of -inf: 0 * -inf is no contribution
        mean = torch.linalg.vecdot(probabilities, shifted.clamp(min=torch.finfo(shifted.dtype).min))
    return log_total - shifted.gather(1, following[:, None])[:, 0], log_total - mean, first - second


def two_largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the second largest of each row, [rows] each.

    Maxima of groups first: a maximum is an order of magnitude faster than one with its place, or `topk`.
    """
    count = rows.shape[1] // GROUP
    whole, rest = rows[:, : count * GROUP], rows[:, count * GROUP :]
    if count == 0:
        return _top_two(rest)
    groups = whole.unflatten(1, (count, GROUP))
    maxima = groups.amax(dim=-1)
    best = maxima.argmax(dim=-1, keepdim=True)
    inside = groups.gather(1, best[:, :, None].expand(-1, -1, GROUP))[:, 0]
    others = maxima.scatter(1, best, -torch.inf)
    return _top_two(torch.cat([inside, others, rest], dim=-1))


def _top_two(rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.shape[1] == 1:
        return rows[:, 0], torch.full_like(rows[:, 0], -torch.inf)
    largest = rows.topk(2, dim=-1).values
    return largest[:, 0], largest[:, 1]
