"""Causal smoothing of series that come in blocks: any blocks give the same values."""

from __future__ import annotations

import torch
from torch import Tensor

from cfkv.policies._base import Memory

EPSILON = 1e-6


def trailing(memory: Memory, name: str, series: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The last `window` values of each row of `series` [R, C] at each token: [R, C, window], and how many exist.

    Windows are filled from their end; before the first value stand zeros. `memory[name]` carries what the next
    block needs.
    """
    before = memory.get(name, series.new_empty(series.shape[0], 0))
    whole = torch.cat([before, series], dim=-1)
    memory[name] = whole[:, -(window - 1) :] if window > 1 else whole[:, :0]
    padded = torch.nn.functional.pad(whole, (window - 1, 0))
    windows = padded.unfold(-1, window, 1)[:, before.shape[1] :]
    counts = (torch.arange(series.shape[1], device=series.device) + before.shape[1] + 1).clamp(max=window)
    return windows, counts


def rolling_mean(memory: Memory, name: str, series: Tensor, window: int) -> Tensor:
    """Mean over the trailing window, this value included; shorter at the start."""
    windows, counts = trailing(memory, name, series, window)
    return windows.sum(dim=-1) / counts


def rolling_z(memory: Memory, name: str, series: Tensor, window: int) -> Tensor:
    """(value - mean) / (population std + 1e-6) of the trailing window; 0 for the first value."""
    windows, counts = trailing(memory, name, series, window)
    mean = windows.sum(dim=-1) / counts
    exists = torch.arange(window, device=series.device) >= window - counts[:, None]
    squares = ((windows - mean[..., None]) * exists).square().sum(dim=-1)
    z = (series - mean) / ((squares / counts).sqrt() + EPSILON)
    return torch.where(counts > 1, z, 0)


def exponential(memory: Memory, name: str, series: Tensor, newest: float) -> Tensor:
    """m = newest * value + (1 - newest) * m before; the first value starts it."""
    values = []
    mean = memory.get(name)
    for value in series.unbind(dim=-1):
        mean = value if mean is None else newest * value + (1 - newest) * mean
        values.append(mean)
    if mean is not None:
        memory[name] = mean
    return torch.stack(values, dim=-1) if values else series
