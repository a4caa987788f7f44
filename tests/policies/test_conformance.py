"""Identities that the methods must satisfy (methods 11), one test each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dense_cache import Dense, array
from torch import Tensor
from world import DIM, HEADS, KV_HEADS, LAYERS, Table, World, by_token

from cfkv.policies._base import Policy, State, View, make_policy, policy_kinds
from cfkv.policies._budget import Budget, keep_mask
from cfkv.policies._redundancy import repetition
from cfkv.policies.ahakv import step_gain

LENGTH, PROMPT = 120, 40


@pytest.fixture
def world() -> World:
    return World(LENGTH, PROMPT, seed=6)


def scores(world: World, policy: Policy, **extra: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """In the order of the tokens."""
    table = world.fill(policy, LENGTH)
    return array(by_token(policy.score(world.view(policy, table, slots=64, extra=extra)), table.tokens))


@pytest.mark.parametrize("scope", ["total", "beyond_protected"])
@pytest.mark.parametrize("name", policy_kinds.names())
def test_a_budget_of_everything_is_full(name: str, scope: Any, world: World) -> None:
    """K >= n: the same cache as without eviction, and so the same tokens."""
    policy = make_policy(name)
    view = world.view(policy, world.fill(policy, LENGTH), slots=LENGTH)
    for slots in (LENGTH, LENGTH + 1, 10 * LENGTH):
        assert torch.equal(keep_mask(policy, view, Budget(slots=slots, scope=scope)), view.valid)


@pytest.mark.parametrize("name", policy_kinds.names())
def test_both_scopes_of_a_budget_keep_the_same(name: str, world: World) -> None:
    """100 in all are 100 less the protected beside them."""
    policy = make_policy(name, {"lag": 20} if name.startswith("lagkv") else None)
    view = world.view(policy, world.fill(policy, LENGTH), slots=64)
    protected = int((view.valid & view.protected).sum(dim=-1).max())
    beside = Budget(slots=100 - protected, scope="beyond_protected")
    assert torch.equal(keep_mask(policy, view, Budget(slots=100)), keep_mask(policy, view, beside))


def test_h2o_mass_is_the_number_of_rows(world: World) -> None:
    """Each of the two query heads of a KV head gives every row 1."""
    assert np.allclose(scores(world, make_policy("h2o")).sum(axis=-1), 2 * LENGTH)


def test_h2o_favours_early_tokens() -> None:
    """Uniform attention: token j of 4 has 1/(j + 1) + ... + 1/4, per query head, so the first 25 / 12."""
    world = World(4, 4)
    world.queries.zero_()
    policy = make_policy("h2o")
    table = world.fill(policy, 4)
    found = by_token(policy.score(world.view(policy, table)), table.tokens)[0, 0]
    assert found.tolist() == pytest.approx([50 / 12, 26 / 12, 14 / 12, 6 / 12])


def test_tova_and_longflow_agree_on_equal_values(world: World) -> None:
    world.values /= world.values.abs().sum(dim=-1, keepdim=True)
    ranks = [scores(world, make_policy(name)).argsort(axis=-1) for name in ("tova", "longflow")]
    assert np.array_equal(*ranks)


def test_caote_is_the_change_of_the_output(world: World) -> None:
    """To 1e-6, of the mean over the two query heads of a KV head."""
    found = scores(world, make_policy("caote"))
    cache = Dense(world, world.fill(make_policy("full"), LENGTH))
    for layer, head in ((0, 0), (2, 1)):
        values = cache.values(layer, head)
        for j in (0, 7, LENGTH - 1):
            moved = []
            for h in cache.group(head):
                row = cache.row(layer, h, LENGTH - 1)
                without = row.copy()
                without[j] = 0
                moved.append(np.linalg.norm(row @ values - without @ values / without.sum()))
            assert abs(found[layer, head, j] - np.mean(moved)) < 1e-6


def test_capkv_leverage(world: World) -> None:
    """s in [0, 1) and their sum at most the head dimension."""
    found = scores(world, make_policy("capkv"))
    assert ((found >= 0) & (found < 1)).all()
    assert (found.sum(axis=-1) <= DIM).all()
    assert (found.sum(axis=-1) > 1).all()


def rows_of(keys: Tensor) -> View:
    """Tokens 0, 1, ... in order with these keys [n, D], one layer and one KV head."""
    positions = torch.arange(len(keys))[None, None]
    everywhere = torch.ones_like(positions, dtype=torch.bool)
    return View(
        step=len(keys),
        prompt_len=0,
        positions=positions,
        valid=everywhere,
        protected=~everywhere,
        columns={"keys": keys[None, None]},
    )


def test_r_kv_ranks_duplicates_by_age() -> None:
    """Of 5 keys, 1, 2 and 4 are equal. Row 1 exempts 4 and row 2 too, row 4 exempts 2: the columns hold 2, 1 and 0
    fifths."""
    keys = torch.eye(5)
    keys[2], keys[4] = keys[1], keys[1]
    assert repetition(rows_of(keys))[0, 0].tolist() == pytest.approx([0, 2 / 5, 1 / 5, 0, 0])


def test_r_kv_ties_a_pair() -> None:
    """Each exempts the other."""
    keys = torch.eye(4)
    keys[3] = keys[0]
    assert repetition(rows_of(keys))[0, 0].tolist() == [0, 0, 0, 0]


def test_r_kv_below_the_threshold_nothing_is_exempt() -> None:
    """Cosine .4 of two keys is half of .4 for each; the authors' code exempts the first."""
    keys = torch.tensor([[1, 0], [0.4, math.sqrt(1 - 0.16)]])
    assert repetition(rows_of(keys))[0, 0].tolist() == pytest.approx([0.2, 0.2])
    assert repetition(rows_of(keys), first_column=True)[0, 0].tolist() == pytest.approx([0, 0.2])


@pytest.mark.parametrize(
    ("age", "interval", "expected"),
    [
        # 2 sigmoid(0) = 1, 2 sigmoid(-1) = .5379, 2 sigmoid(-2) = .2384; H2 = .5379 at 1, .9003 at 5, .9900 at 50
        (0, 1, 1 + 0.5379),
        (1, 1, 0.5379 + 0.5379),
        (2, 1, 0.2384 + 0.5379),
        (5, 5, 0.5379 + 0.9003),
        (10, 5, 0.2384 + 0.9003),
        (50, 50, 0.5379 + 0.9900),
        (0, 0, 1),
        (1, 0, 0),
    ],
)
def test_lazy_eviction(age: int, interval: int, expected: float) -> None:
    state = {"stamp": torch.tensor([[[99.0 - age]]]), "interval": torch.tensor([[[float(interval)]]])}
    view = replace(rows_of(torch.eye(1)), step=100, state=state)
    assert float(make_policy("lazy_eviction").score(view)) == pytest.approx(expected, abs=1e-4)


def test_ahakv_step_gain() -> None:
    """1 / sqrt(d) up to i / k = e^.5; at e^2, sqrt(2 * 2 / d)."""
    seen = torch.tensor([50.0, 100.0, 100 * math.exp(0.5), 100 * math.exp(2)])
    assert step_gain(seen, 100, 16).tolist() == pytest.approx([0.25, 0.25, 0.25, 0.5])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lagkv", {"sinks": 4, "lag": 16}),
        ("lagkv_rank", {"sinks": 4, "lag": 16}),
        ("epikv_lag_key", {"chunk": 16}),
        ("epikv_lag_kv", {"chunk": 16}),
        ("epikv_lag_kv", {"chunk": 16, "frozen": True}),
    ],
)
def test_lagkv_takes_any_scale(name: str, options: dict[str, Any], world: World) -> None:
    """A positive affine change per channel; but the causal version's first chunk is on the raw scale."""
    policy = make_policy(name, options)
    before = scores(world, policy)
    generator = torch.Generator().manual_seed(0)
    for vectors in (world.keys, world.values):
        gain = 0.5 + torch.rand(1 if "epikv" in name else LAYERS, KV_HEADS, 1, DIM, generator=generator)
        vectors *= gain
        vectors += torch.randn(gain.shape, generator=generator)
    after = scores(world, policy)
    first = 16 if "epikv" in name else 0
    np.testing.assert_allclose(after[..., first:], before[..., first:], rtol=1e-3, atol=1e-5)
    if first:
        assert np.abs(after[..., :first] - before[..., :first]).max() > 0.01


def bent(policy: Any, curve: Callable[[Tensor], Tensor]) -> Any:
    """The policy with its three terms bent."""
    for term in ("pressure", "redundancy", "payload"):
        original = getattr(policy, term)
        object.__setattr__(policy, term, lambda view, original=original: curve(original(view)))
    return policy


@pytest.mark.parametrize("curve", [lambda x: 3 * x + 1, lambda x: x**3, lambda x: torch.exp(2 * x)])
def test_avokv_sees_only_ranks(curve: Callable[[Tensor], Tensor], world: World) -> None:
    """float64, so that a curve makes no new ties."""
    policy = make_policy("avokv_e")
    expected = scores(world, policy)
    found = scores(world, bent(make_policy("avokv_e"), lambda x: curve(x.double())))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    raw = scores(world, bent(make_policy("avokv_e_raw"), lambda x: curve(x.double())))
    assert np.abs(raw - scores(world, make_policy("avokv_e_raw"))).max() > 0.01


def test_avokv_averages_the_ranks_of_ties() -> None:
    """Value norms 1, 2, 2, 5 of four candidates: ranks 0, 1.5, 1.5, 3 of 3; one candidate alone has .5."""
    policy: Any = make_policy("avokv_e", {"read_weight": 0, "redundancy_weight": 0, "payload_weight": 1})
    values = torch.tensor([[1.0, 0], [0, 2], [-2, 0], [3, 4], [9, 9]])
    view = rows_of(torch.eye(5))
    protected = view.positions == 4
    view = replace(view, protected=protected, columns={"values": values[None, None]})
    assert policy.score(view)[0, 0].tolist() == pytest.approx([0, 0.5, 0.5, 1, 0])
    alone = replace(view, protected=view.positions > 0)
    assert policy.score(alone)[0, 0].tolist() == [0.5, 0, 0, 0, 0]


def test_ties_go_to_the_later_token(world: World) -> None:
    policy = make_policy("full")
    table = world.fill(policy, LENGTH)
    keep = keep_mask(policy, world.view(policy, table), Budget(slots=7))
    assert sorted(table.tokens[keep].tolist()) == list(range(LENGTH - 7, LENGTH))


@pytest.mark.parametrize("name", ["snapkv", "snapkv_decode", "pyramidkv", "chunkkv", "r_kv"])
def test_a_window_is_above_all_that_is_scored(name: str, world: World) -> None:
    """It says so where nobody looks at protection, e.g. when a score is held against labels."""
    policy = make_policy(name)
    found = scores(world, policy)
    before = LENGTH - policy.window
    assert (found[..., before:].min(axis=-1) > found[..., :before].max(axis=-1)).all()


def test_identical_query_heads_agree_with_one(world: World) -> None:
    """The group's mean changes nothing where its heads are the same: SnapKV per query head is SnapKV per KV head."""
    world.queries[:, 1::2] = world.queries[:, ::2]
    cache = Dense(world, Table(torch.arange(LENGTH)[None, None], State({}, {}), LENGTH))
    found = scores(world, make_policy("snapkv_head"))
    for layer in range(LAYERS):
        for h in range(HEADS):
            alone = np.mean([cache.row(layer, h, i) for i in range(LENGTH - 32, LENGTH)], axis=0)
            np.testing.assert_allclose(found[layer, h // 2], alone, atol=1e-6)
