"""ThinKV's types, ladder and representatives, worked by hand."""

from __future__ import annotations

import torch
from world import World

from cfkv.policies._base import make_policy
from cfkv.policies._budget import Budget, keep_mask
from cfkv.policies._kmeans import representatives
from cfkv.policies.thinkv_original import EXECUTION, REASONING, TRANSITION, ThinkvOriginal


def test_types_by_sparsity() -> None:
    policy = ThinkvOriginal(thresholds=(0.5, 0.8))
    assert [policy.kind(s) for s in (0.1, 0.5, 0.79, 0.8)] == [EXECUTION, REASONING, REASONING, TRANSITION]


def test_representatives_of_three_clusters() -> None:
    """Values 0, 1, 2 | 10, 11 | 20 of three clusters: the middle one of the first, the later of the equal pair, 20."""
    vectors = torch.tensor([[[0.0], [1.0], [2.0], [10.0], [11.0], [20.0]]])
    ranks = representatives(vectors, torch.ones(1, 6, dtype=torch.bool), 3)[0]
    assert sorted(ranks.tolist()) == list(range(6))
    assert ranks[1] == 0  # the largest cluster's centroid is 1
    assert {int(i) for i in (ranks < 3).nonzero()} in ({1, 3, 5}, {1, 4, 5})


def test_a_transition_steps_earlier_segments_down() -> None:
    """Prompt 16, segments of 16: types R, T, R. What precedes the transition keeps ladder[0] = 8 tokens."""
    world = World(64, 16)
    policy = make_policy("thinkv_original", {"segment": 16, "ladder": (8, 4, 2)})
    table = world.fill(policy, 64)
    segment = table.tokens // 16
    table.state.columns["type"].fill_(float(REASONING))
    table.state.columns["type"][segment == 2] = float(TRANSITION)
    keep = keep_mask(policy, world.view(policy, table), Budget(slots=63))
    counts = [
        [int((keep & (segment == s))[layer, head].sum()) for s in range(4)]
        for layer in range(3)
        for head in range(2)
    ]
    assert counts == [[8, 8, 16, 16]] * 6


def test_over_budget_the_transition_goes_first() -> None:
    """8 + 8 + 16 + 16 = 48 are within; at 40, 8 of the transition's go, although older segments reason."""
    world = World(64, 16)
    policy = make_policy("thinkv_original", {"segment": 16, "ladder": (8, 4, 2)})
    table = world.fill(policy, 64)
    segment = table.tokens // 16
    table.state.columns["type"].fill_(float(REASONING))
    table.state.columns["type"][segment == 2] = float(TRANSITION)
    keep = keep_mask(policy, world.view(policy, table), Budget(slots=40))
    for s, expected in enumerate((8, 8, 8, 16)):
        assert ((keep & (segment == s)).sum(dim=-1) == expected).all()
