"""Rows of logits: the two largest without a sort, and what is special about some rows."""

from __future__ import annotations

import pytest
import torch

from cfkv.signals._logits import GROUP, logit_rows, two_largest


@pytest.mark.parametrize("width", [1, 2, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP, 5 * GROUP + 7])
def test_two_largest_are_those_of_a_sort(width: int) -> None:
    """Also where both lie in one group, in the rest, or are equal."""
    rows = torch.randn(50, width, generator=torch.Generator().manual_seed(width))
    rows[0] = 1.0
    rows[1, -1] = 9.0
    rows[2, :2] = 9.0
    ordered = rows.sort(dim=-1, descending=True).values
    first, second = two_largest(rows)
    assert torch.equal(first, ordered[:, 0])
    assert torch.equal(second, ordered[:, 1] if width > 1 else torch.full((50,), -torch.inf))


def test_banned_tokens_count_nothing() -> None:
    """Logits of -inf, and a distribution that is certain."""
    logits = torch.full((2, 600), -torch.inf)
    logits[0, [3, 500]] = torch.tensor([1.0, 1.0])
    logits[1, 7] = -4.0
    found = logit_rows(logits, torch.tensor([3, 7]))
    assert torch.allclose(found.surprisal, torch.tensor([2.0, 1.0]).log(), atol=1e-6)
    assert torch.allclose(found.entropy, torch.tensor([2.0, 1.0]).log(), atol=1e-6)
    assert found.margin.tolist() == [0.0, torch.inf]


def test_large_logits_keep_their_precision() -> None:
    """The same numbers as float64 gives, for logits far from zero."""
    logits = 40 + 3 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    logs = logits.double().log_softmax(dim=-1)
    found = logit_rows(logits.clone(), torch.tensor([0, 1, 2, 3]))
    assert torch.allclose(found.entropy.double(), -(logs.exp() * logs).sum(dim=-1), atol=5e-6)
    assert torch.allclose(found.surprisal.double(), -logs.diagonal(), atol=5e-6)
