"""Budgets and the rule of selection, for any numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.policies._base import Protection
from cfkv.policies._budget import Budget, select, victim

few = settings(max_examples=60, deadline=None)
counts = st.integers(1, 5000)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with many ties, positions, valid and protected of two rows with at least one candidate each."""
    size = draw(st.integers(1, 9))
    rows = []
    for _ in range(2):
        scores = draw(st.lists(st.sampled_from([-2.0, 0.0, 0.5]), min_size=size, max_size=size))
        positions = draw(st.permutations(range(size)))
        valid, protected = (draw(st.lists(st.booleans(), min_size=size, max_size=size)) for _ in range(2))
        valid[0], protected[0] = True, False
        rows.append((scores, positions, valid, protected))
    return tuple(torch.tensor(column) for column in zip(*rows, strict=True))  # type: ignore[return-value]


@few
@given(table=tables())
def test_the_victim_is_what_one_slot_less_drops(table: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    scores, positions, valid, protected = table
    gone = victim(scores, positions, valid, protected)
    free = (valid & ~protected).sum(dim=-1)
    before, after = (select(scores, positions, valid, protected, free - less) for less in (0, 1))
    assert torch.equal(before, valid)
    dropped = before & ~after
    assert dropped.sum(dim=-1).tolist() == [1, 1]
    assert dropped.long().argmax(dim=-1).tolist() == gone.tolist()


@few
@example(hundredths=29, tokens=100)
@given(hundredths=st.integers(0, 100), tokens=counts)
def test_a_fraction_is_rounded_down(hundredths: int, tokens: int) -> None:
    """The exact product, so .29 of 100 is 29 although .29 * 100 < 29 in floats."""
    budget = Budget.of_fraction(hundredths / 100, tokens)
    assert budget.slots == Fraction(hundredths, 100) * tokens // 1
    assert budget.scope == "beyond_protected"


@few
@given(size=st.integers(1, 10**12), each=counts)
def test_bytes_hold_whole_tokens(size: int, each: int) -> None:
    if size < each:
        with pytest.raises(CfkvError, match=f"{size} bytes holds no token: one takes {each} bytes"):
            Budget.of_bytes(size, each)
    else:
        slots = Budget.of_bytes(size, each).slots
        assert slots * each <= size < (slots + 1) * each


def test_bytes_of_a_known_model() -> None:
    """Llama-3 8B: 2 * 32 layers * 8 KV heads * 128 * 2 bytes = 131,072 a token; a quarter GiB holds 2,048."""
    assert Budget.of_bytes(2**28, 131072).slots == 2048


@few
@given(slots=counts, length=counts, share=st.floats(0, 1))
def test_room(slots: int, length: int, share: float) -> None:
    """total: all kept together are min(length, slots). beyond_protected: the protected are extra."""
    protected = int(share * length)
    assert Budget(slots=slots, scope="beyond_protected").room(protected, length) == slots
    assert Budget(slots=slots, scope="beyond_protected").total(protected) == slots + protected
    budget = Budget(slots=slots)
    assert budget.total(protected) == slots
    if length > slots and protected >= slots:
        with pytest.raises(CfkvError, match=f"{slots} tokens is not above the {protected} "):
            budget.room(protected, length)
    else:
        assert protected + budget.room(protected, length) == min(length, slots)


@pytest.mark.parametrize("fraction", [-0.1, 1.01, float("nan")])
def test_no_fraction(fraction: float) -> None:
    with pytest.raises(CfkvError, match="is no fraction; legal: 0 to 1"):
        Budget.of_fraction(fraction, 100)


def test_a_budget_of_nothing() -> None:
    with pytest.raises(CfkvError, match="raise it to 1 or more"):
        Budget(slots=0)
    assert Budget(slots=0, scope="beyond_protected").room(3, 10) == 0


@few
@given(prompt=st.integers(0, 30), sinks=st.integers(0, 8), recent=st.integers(0, 40), step=st.integers(1, 60))
def test_protection_counts_what_it_masks(prompt: int, sinks: int, recent: int, step: int) -> None:
    protection = Protection(prompt=prompt % 2 == 0, sinks=sinks, recent=recent)
    positions = torch.arange(step)
    mask = protection.mask(positions, torch.ones(step, dtype=torch.bool), prompt, step)
    first = max(sinks, prompt) if protection.prompt else sinks
    assert mask.tolist() == [p < first or p >= step - recent for p in range(step)]
    assert protection.count(prompt, step) == sum(mask.tolist())
