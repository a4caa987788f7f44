"""Token by token with evictions in between: slots are reused, attention is over what is left, state moves or is lost.

Each policy runs beside plain code that keeps sets of tokens and dictionaries, one per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from dense_cache import Array, Dense
from world import HEADS, KV_HEADS, LAYERS, Table, World

from cfkv.policies._base import Policy, State, make_policy
from cfkv.policies._budget import Budget, keep_mask

LENGTH, PROMPT, SLOTS = 90, 12, 30


@pytest.fixture(scope="module")
def world() -> World:
    return World(LENGTH, PROMPT, seed=8)


def run(world: World, policy: Policy) -> list[list[list[set[int]]]]:
    """What each row [l][g] holds after each token."""
    rows = policy.rows(LAYERS, KV_HEADS)
    size = SLOTS + policy.schedule.growth
    tokens, state = torch.full((*rows, size), -1), policy.init(rows, size)
    history = []
    for start, stop in ((0, PROMPT), *((t, t + 1) for t in range(PROMPT, LENGTH))):
        new = torch.arange(start, stop)
        places = (tokens >= 0).to(torch.int8).argsort(dim=-1, stable=True)[..., : len(new)]
        state.reset(places)
        tokens.scatter_(-1, places, new.expand(places.shape))
        policy.observe(state, world.seen(policy, new, places, tokens))
        if policy.schedule.due(max(stop - PROMPT, 0)) and int((tokens >= 0).sum(dim=-1).max()) > SLOTS:
            view = world.view(policy, Table(tokens, state, stop), slots=SLOTS)
            tokens = tokens.masked_fill(~keep_mask(policy, view, Budget(slots=SLOTS)), -1)
        history.append([[set(row[row >= 0].tolist()) for row in layer] for layer in tokens])
    return history


Rows = Callable[[int, list[int]], Array]


@dataclass
class Row:
    """One row by plain code: `alive` tokens and a number or two for each."""

    read: Rows
    alive: list[int] = field(default_factory=list)
    value: dict[int, float] = field(default_factory=dict)
    gap: dict[int, float] = field(default_factory=dict)


def rows_of(cache: Dense, heads: list[tuple[int, int]], how: Callable[..., Array]) -> Rows:
    """Attention of query t over `alive`, of some (layer, query head) pairs, reduced by `how`."""

    def read(t: int, alive: list[int]) -> Array:
        held = np.array(alive)
        return how([cache.row(layer, h, t, held) for layer, h in heads], axis=0)

    return read


def h2o(row: Row, t: int) -> None:
    for j, mass in zip(row.alive, row.read(t, row.alive), strict=True):
        row.value[j] = row.value.get(j, 0) + float(mass)


def h2o_global(row: Row, t: int) -> None:
    weight = 1 / PROMPT if t < PROMPT else 1
    for j, mass in zip(row.alive, row.read(t, row.alive), strict=True):
        row.value[j] = row.value.get(j, 0) + weight * float(mass)


def tova(row: Row, t: int) -> None:
    row.value = dict(zip(row.alive, row.read(t, row.alive).tolist(), strict=True))


def raas(row: Row, t: int) -> None:
    row.value[t] = t
    for j, mass in zip(row.alive, row.read(t, row.alive), strict=True):
        if mass > 0.01 and t >= PROMPT:
            row.value[j] = t


def raas_epikv(row: Row, t: int) -> None:
    row.value[t] = t
    reads = {j: m for j, m in zip(row.alive, row.read(t, row.alive), strict=True) if j >= PROMPT}
    for j, mass in reads.items():
        if mass >= np.median(list(reads.values())):
            row.value[j] = t


def lazy_eviction(row: Row, t: int) -> None:
    """`gap` is MRI and `value` is TS, until the end of the step turns it into a score: see `lazy_score`."""
    row.value[t], row.gap[t] = t, 0
    for j, mass in zip(row.alive, row.read(t, row.alive), strict=True):
        if mass >= 1 / len(row.alive):
            row.gap[j] = max(row.gap[j], t - row.value[j])
            row.value[j] = t


def by_value(row: Row, j: int, t: int) -> float:
    return row.value[j]


def lazy_score(row: Row, j: int, t: int) -> float:
    if row.gap[j] == 0:
        return float(row.value[j] == t)
    return float(2 / (1 + np.exp((t - row.value[j]) / row.gap[j])) + 2 / (1 + np.exp(1 / row.gap[j])))


ALL = [(layer, h) for layer in range(LAYERS) for h in range(HEADS)]


@dataclass(frozen=True)
class Simulation:
    """fold one token, score one token; how query heads are reduced; first and last tokens protected; every m tokens."""

    fold: Callable[[Row, int], None]
    how: Callable[..., Array] = np.mean
    score: Callable[[Row, int, int], float] = by_value
    first: int = 0
    last: int = 0
    every: int = 1
    options: dict[str, float] = field(default_factory=dict)


SIMULATIONS = {
    "h2o": Simulation(h2o, np.sum, last=SLOTS // 2),
    "h2o_global": Simulation(h2o_global, first=4, last=SLOTS // 4),
    "tova": Simulation(tova),
    "raas": Simulation(raas, first=PROMPT, options={"alpha": 0.01}),
    "raas_epikv": Simulation(raas_epikv, first=PROMPT),
    "lazy_eviction": Simulation(lazy_eviction, np.max, lazy_score, last=6, every=6, options={"every": 6}),
}


@pytest.mark.parametrize("name", sorted(SIMULATIONS))
def test_token_by_token(name: str, world: World) -> None:
    plain = SIMULATIONS[name]
    policy = make_policy(name, plain.options)
    cache = Dense(world, Table(torch.arange(LENGTH)[None, None], State({}, {}), LENGTH))
    if policy.mask_scope == "global":
        heads = [[ALL]]
    elif policy.mask_scope == "layer":
        heads = [[[(layer, h) for h in range(HEADS)]] for layer in range(LAYERS)]
    else:
        heads = [[[(layer, h) for h in cache.group(g)] for g in range(KV_HEADS)] for layer in range(LAYERS)]
    rows = [[Row(rows_of(cache, pairs, plain.how)) for pairs in layer] for layer in heads]
    found = run(world, policy)
    for t in range(LENGTH):
        for row in (row for layer in rows for row in layer):
            row.alive.append(t)
            plain.fold(row, t)
            if len(row.alive) > SLOTS and (t + 1 - PROMPT) % plain.every == 0:
                free = [j for j in row.alive if plain.first <= j <= t - plain.last]
                worst_first = sorted(free, key=lambda j: (plain.score(row, j, t), j))  # noqa: B023
                for j in worst_first[: len(row.alive) - SLOTS]:
                    row.alive.remove(j)
        if t >= PROMPT:
            assert found[t - PROMPT + 1] == [[set(row.alive) for row in layer] for layer in rows], t
    assert (
        any(len(layer) > 1 and layer[0] != layer[1] for layer in found[-1]) or policy.mask_scope != "kv_head"
    )
