"""Windows over a reasoning span (EpiKV, methods 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def windows(start: int, stop: int, size: int, stride: int) -> list[tuple[int, int]]:
    """Half-open windows over the span [start, stop).

    Starts are start, start + stride, ...; there are ceil(max(N - size, 0) / stride) + 1 of them for N = stop -
    start >= 1 tokens, and the last is clipped to `stop`. An empty span has no window. A stride above `size`
    leaves gaps; a window that would begin after the span is then left out.
    """
    length = stop - start
    if length <= 0:
        return []
    count = min(-(-max(length - size, 0) // stride) + 1, -(-length // stride))
    return [(start + index * stride, min(start + index * stride + size, stop)) for index in range(count)]


def token_importance(total: int, spans: Sequence[tuple[int, int]], flipped: Sequence[bool]) -> np.ndarray:
    """Token labels by OR over the covering windows, int8 [total]: 1, 0, or -1 where no window covers."""
    labels = np.full(total, -1, dtype=np.int8)
    for (start, stop), flip in zip(spans, flipped, strict=True):
        labels[start:stop] = np.maximum(labels[start:stop], np.int8(flip))
    return labels


def token_mean(total: int, spans: Sequence[tuple[int, int]], values: Sequence[float]) -> np.ndarray:
    """Mean of the covering windows' values, float32 [total]; NaN where no window covers."""
    sums, counts = np.zeros(total), np.zeros(total)
    for (start, stop), value in zip(spans, values, strict=True):
        sums[start:stop] += value
        counts[start:stop] += 1
    with np.errstate(invalid="ignore"):
        return (sums / counts).astype(np.float32)
