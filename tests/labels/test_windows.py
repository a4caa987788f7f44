"""Windows over a span, and how their results become token labels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfkv.labels._windows import token_importance, token_mean, windows


@pytest.mark.parametrize(
    ("length", "count"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (48, 2), (49, 3), (3344, 208)]
)
def test_counts_of_the_paper(length: int, count: int) -> None:
    """methods 5.1: ceil(max(N - 32, 0) / 16) + 1."""
    assert len(windows(100, 100 + length, 32, 16)) == count


def test_last_window_is_clipped() -> None:
    assert windows(10, 59, 32, 16) == [(10, 42), (26, 58), (42, 59)]
    assert windows(10, 15, 32, 16) == [(10, 15)]
    assert windows(7, 7, 32, 16) == []


@pytest.mark.parametrize(
    ("size", "stride"), [(32, 16), (8, 4), (8, 8), (5, 3), (1, 1), (64, 1), (2, 5), (8, 16)]
)
def test_every_length_against_brute_force(size: int, stride: int) -> None:
    """Reference: slide until a window reaches the end (or, with gaps, until none would begin inside)."""
    for length in range(1, 201):
        expected, start = [], 0
        while start < length:
            expected.append((3 + start, 3 + min(start + size, length)))
            if start + size >= length:
                break
            start += stride
        found = windows(3, 3 + length, size, stride)
        assert found == expected, (length, size, stride)
        assert all(start < stop for start, stop in found)
        covered = np.zeros(length, dtype=int)
        for start, stop in found:
            covered[start - 3 : stop - 3] += 1
        if stride <= size:
            assert covered.min() >= 1
            assert covered.max() <= math.ceil(size / stride)


def test_interior_is_covered_twice_and_the_ends_once() -> None:
    covered = np.zeros(320, dtype=int)
    for start, stop in windows(0, 320, 32, 16):
        covered[start:stop] += 1
    assert set(covered[:16]) == set(covered[-16:]) == {1}
    assert set(covered[16:-16]) == {2}


SPANS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans(), st.floats(-5, 5, width=32)), max_size=8
)


@given(total=st.integers(20, 25), drawn=SPANS)
def test_token_labels_against_brute_force(total: int, drawn: list[tuple[int, int, bool, float]]) -> None:
    spans = [(min(a, b), max(a, b)) for a, b, _, _ in drawn]
    flips, values = [flip for _, _, flip, _ in drawn], [value for _, _, _, value in drawn]
    importance = token_importance(total, spans, flips)
    mean = token_mean(total, spans, values)
    assert (importance.dtype, importance.shape) == (np.int8, (total,))
    assert (mean.dtype, mean.shape) == (np.float32, (total,))
    for token in range(total):
        over = [i for i, (start, stop) in enumerate(spans) if start <= token < stop]
        if over:
            assert importance[token] == int(any(flips[i] for i in over))
            assert mean[token] == pytest.approx(sum(values[i] for i in over) / len(over), abs=1e-5)
        else:
            assert importance[token] == -1
            assert np.isnan(mean[token])


def test_or_rule_on_a_crafted_case() -> None:
    spans = [(2, 6), (4, 8), (6, 9)]
    assert token_importance(10, spans, [False, True, False]).tolist() == [-1, -1, 0, 0, 1, 1, 1, 1, 0, -1]
    mean = token_mean(10, spans, [1.0, -3.0, 0.5])
    assert np.isnan(mean[[0, 1, 9]]).all()
    assert mean[2:9].tolist() == [1.0, 1.0, -1.0, -1.0, -1.25, -1.25, 0.5]
