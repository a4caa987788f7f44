"""The contract of a policy, for every registered one: what each gets for free (cfkv/policies/_base.py)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from world import KV_HEADS, LAYERS, Table, World, by_token, thinned

from cfkv.errors import CfkvError
from cfkv.policies._base import SEEN_COLUMNS, VIEW_COLUMNS, Policy, View, make_policy, policy_kinds
from cfkv.policies._budget import Budget, keep_mask, select

NAMES = policy_kinds.names()
LENGTH, PROMPT = 150, 40
# Parameters that make published block lengths fit several times into a short sequence.
SMALL: dict[str, dict[str, Any]] = {
    "lagkv": {"sinks": 4, "lag": 16},
    "lagkv_rank": {"sinks": 4, "lag": 16},
    "epikv_lag_key": {"chunk": 32},
    "epikv_lag_kv": {"chunk": 32},
    "thinkv_epikv": {"segment": 32},
    "thinkv_original": {"segment": 16, "ladder": (8, 6, 4, 3, 2)},
    "segment_hybrid": {"segment": 32},
    "segment_hybrid_keys": {"segment": 32},
    "manifoldkv_windowed": {"length": 32},
    "ahakv": {"cache": 20},
}


def make(name: str) -> Policy:
    return make_policy(name, SMALL.get(name))


@pytest.fixture(scope="module")
def world() -> World:
    return World(LENGTH, PROMPT)


@pytest.mark.parametrize("name", NAMES)
class TestContract:
    """Every registered policy."""

    def test_declarations(self, name: str) -> None:
        kind = policy_kinds.get(name)
        policy = make(name)
        assert set(policy.needs) <= set(VIEW_COLUMNS)
        assert set(policy.observes) <= set(SEEN_COLUMNS)
        assert policy.mask_scope in ("global", "layer", "kv_head")
        assert bool(policy.observes) == bool(policy.state)
        for text in (kind.source, kind.equation, inspect.getdoc(kind) or ""):
            assert len(text.strip()) > 3
        assert kind.__doc__ != kind.__mro__[1].__doc__
        assert (policy.window > 0) == bool({"attention", "queries"} & set(policy.needs))
        assert policy.schedule.due(0) == (policy.schedule.kind != "never")

    def test_shape_and_finite(self, name: str, world: World) -> None:
        policy = make(name)
        for step in (LENGTH, PROMPT + 1, PROMPT):
            view = world.view(policy, world.fill(policy, step), slots=64)
            scores = policy.score(view)
            assert scores.shape == (*policy.rows(LAYERS, KV_HEADS), step + 5)
            assert scores.dtype == torch.float32
            assert scores[view.valid].isfinite().all()

    def test_order_of_slots_does_not_matter(self, name: str, world: World) -> None:
        policy = make(name)
        first, second = (world.fill(policy, LENGTH, seed=seed, spare=seed) for seed in (1, 9))
        assert_same_scores(world, policy, first, second)
        assert_same_scores(
            world, policy, *(thinned(world, policy, table, 100, 80) for table in (first, second))
        )

    def test_blocks_do_not_matter(self, name: str, world: World) -> None:
        policy = make(name)
        if policy.observes:
            tables = [world.fill(policy, LENGTH, block=block) for block in (1, 7, LENGTH)]
            for other in tables[1:]:
                assert_same_scores(world, policy, tables[0], other)

    def test_same_bits_and_no_side_effects(self, name: str, world: World) -> None:
        policy = make(name)
        view = world.view(policy, world.fill(policy, LENGTH), slots=64)
        held = View(**{**vars(view), "columns": {key: view[key].clone() for key in policy.needs}})
        before = snapshot(held)
        first = policy.score(held).clone()
        assert torch.equal(first, policy.score(held))
        keep_mask(policy, held, Budget(slots=100))
        after = snapshot(held)
        assert all(torch.equal(before[key], after[key]) for key in before)

    def test_reads_what_it_declares(self, name: str, world: World) -> None:
        policy = make(name)
        view = world.view(policy, world.fill(policy, LENGTH), slots=64)
        read = Recorder(view.columns)
        policy.score(View(**{**vars(view), "columns": read}))
        assert read.asked == set(policy.needs)

    def test_keeps_what_it_should(self, name: str, world: World) -> None:
        policy = make(name)
        table = world.fill(policy, LENGTH)
        kept: Tensor | None = None
        for slots in (90, 100, 101, 120, LENGTH - 1, LENGTH, LENGTH + 9):
            view = world.view(policy, table, slots=100)
            keep = keep_mask(policy, view, Budget(slots=slots))
            assert not (keep & ~view.valid).any()
            assert (keep | ~view.protected).all()
            counts = keep.sum(dim=-1)
            room = min(slots, LENGTH)
            if slots >= LENGTH and policy.fills:
                assert (counts == LENGTH).all()
            elif not policy.fills:
                assert (counts <= room).all()
            elif not policy.ragged:
                assert (counts == room).all()
            if kept is not None and policy.nested:
                assert (keep | ~kept).all()
            kept = keep

    def test_a_second_eviction(self, name: str, world: World) -> None:
        policy = make(name)
        if not policy.ragged:
            table = thinned(world, policy, world.fill(policy, LENGTH), 100, 80)
            view = world.view(policy, table, slots=80)
            counts = keep_mask(policy, view, Budget(slots=85)).sum(dim=-1)
            assert (counts == 85).all() if policy.fills else (counts <= 85).all()

    @pytest.mark.parametrize("length", [1, 2, 5, 31, 33, 64])
    def test_short_contexts(self, name: str, length: int) -> None:
        """Windows of 32 and more: a right count or an error that names both numbers."""
        policy = make_policy(name)
        world = World(length, max(length // 3, 1), seed=length)
        table = world.fill(policy, length)
        for slots in (1, 4, 16, 40, 64):
            view = world.view(policy, table, slots=slots)
            scores = policy.score(view)
            assert scores[view.valid].isfinite().all()
            protected = int(view.protected.sum(dim=-1).max())
            if slots < length and slots <= protected:
                with pytest.raises(CfkvError, match=f"{slots} tokens is not above the {protected} "):
                    keep_mask(policy, view, Budget(slots=slots))
            else:
                counts = keep_mask(policy, view, Budget(slots=slots)).sum(dim=-1)
                if not policy.ragged and policy.fills:
                    assert (counts == min(slots, length)).all()


def assert_same_scores(world: World, policy: Policy, first: Table, second: Table) -> None:
    a, b = (by_token(policy.score(world.view(policy, t, slots=80)), t.tokens) for t in (first, second))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def snapshot(view: View) -> dict[str, Tensor]:
    parts = {**view.columns, **{f"state {key}": value for key, value in view.state.items()}}
    parts |= {"positions": view.positions, "valid": view.valid, "protected": view.protected}
    return {key: value.clone().nan_to_num(7e7) for key, value in parts.items() if isinstance(value, Tensor)}


class Recorder(dict[str, Any]):
    """Columns that remember which of them were read."""

    def __init__(self, columns: Any) -> None:
        super().__init__(columns)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def test_an_undeclared_column_is_not_there(world: World) -> None:
    policy = make("full")
    with pytest.raises(CfkvError, match="column 'keys' is not there"):
        world.view(policy, world.fill(policy, 5))["keys"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_selection(data: st.DataObject) -> None:
    """Against the rule written as a sort of tuples: protected, then score, then later position."""
    count = data.draw(st.integers(1, 12))
    scores = torch.tensor(
        data.draw(st.lists(st.sampled_from([-1.0, 0.0, 2.5]), min_size=count, max_size=count))
    )
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    valid, protected = (torch.tensor(data.draw(flags)) for _ in range(2))
    positions = torch.tensor(data.draw(st.permutations(range(count))))
    room = data.draw(st.integers(0, count))
    keep = select(scores, positions, valid, protected, room)
    slots = [i for i in range(count) if valid[i]]
    free = sorted((i for i in slots if not protected[i]), key=lambda i: (-scores[i], -positions[i]))
    expected = {i for i in slots if protected[i]} | set(free[:room])
    assert {i for i in range(count) if keep[i]} == expected
