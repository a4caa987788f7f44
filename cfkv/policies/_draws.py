"""Uniform draws that are a function of a seed and a position, so that slots and calls do not matter."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """An unsigned 64-bit number as int64 holds it."""
    return value - 2**64 if value >= 2**63 else value


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def uniform(positions: Tensor, seed: int) -> Tensor:
    """U[0, 1) in float32, by SplitMix64 of seed and position; products wrap around in int64."""
    golden = 0x9E3779B97F4A7C15
    start = _signed((seed * 0xD1342543DE82EF95 + golden) % 2**64)
    mixed = positions.to(torch.int64) * _signed(golden) + start
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, bits)) * _signed(factor)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 40).float() / 2**24
