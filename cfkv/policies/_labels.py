"""The label columns of a trace, by position."""

from __future__ import annotations

import torch
from torch import Tensor

from cfkv.policies._draws import uniform

OWN = 0x0E  # the draws are not those of the random policy


def shuffled(labels: Tensor, seed: int) -> Tensor:
    """`labels` [N] of a whole trace with those that are tested (not NaN) permuted among themselves."""
    tested = (~labels.isnan()).nonzero()[:, 0]
    order = uniform(torch.arange(len(tested)), seed + OWN).argsort(stable=True).to(labels.device)
    result = labels.clone()
    result[tested] = labels[tested[order]]
    return result


def label_column(labels: Tensor, positions: Tensor) -> Tensor:
    """The label of each slot; NaN for positions beyond the labelled trace."""
    inside = positions < len(labels)
    found = labels.to(positions.device)[positions.clamp(0, len(labels) - 1)]
    return torch.where(inside, found, torch.nan)
