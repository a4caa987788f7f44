"""Every policy's score against its formula in float64 (policy_formulas.py), before and after an eviction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_cache import Dense, array
from policy_formulas import CASES, Case
from world import World, by_token, thinned

from cfkv.policies._base import make_policy, policy_kinds

LENGTH, PROMPT, SLOTS = 150, 40, 64
# Worked by hand, or against plain code, in the file that is named.
ELSEWHERE = {
    "full": "test_baselines.py",
    "random": "test_baselines.py",
    "random_page": "test_baselines.py",
    "streaming_llm": "test_baselines.py",
    "streaming_llm_36": "test_baselines.py",
    "streaming_llm_rerotated": "test_baselines.py",
    "oracle": "test_baselines.py",
    "anti_oracle": "test_baselines.py",
    "shuffled_oracle": "test_baselines.py",
    "epikv": "test_epikv.py",
    "epikv_attention": "test_epikv.py",
    "epikv_raw": "test_epikv.py",
    "epikv_ema": "test_epikv.py",
    "epikv_ema_slow": "test_epikv.py",
    "epikv_rolling_mean": "test_epikv.py",
    "epikv_band": "test_epikv.py",
    "kv_key": "test_epikv.py",
    "kv_val": "test_epikv.py",
    "segment_hybrid": "test_segments.py",
    "segment_hybrid_keys": "test_segments.py",
    "thinkv_epikv": "test_segments.py",
    "thinkv_original": "test_thinkv.py",
}


@pytest.fixture(scope="module")
def world() -> World:
    return World(LENGTH, PROMPT, seed=3)


@pytest.mark.parametrize("keep", [LENGTH, 100])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_formula(case: Case, keep: int, world: World) -> None:
    """The score of each candidate; protected tokens have none that matters."""
    policy = make_policy(case.name, case.options)
    table = world.fill(policy, LENGTH)
    if keep < LENGTH:
        table = thinned(world, policy, table, keep, SLOTS)
    view = world.view(policy, table, slots=SLOTS)
    found = array(by_token(policy.score(view), table.tokens))
    free = by_token(view.evictable.to(torch.int8), table.tokens).bool().numpy()
    expected = case.formula(Dense(world, table))
    assert expected.shape == found.shape
    assert free.sum() > 40
    difference = np.abs(found - expected)[free]
    print(f"{case}: largest {difference.max():.1e}, mean {difference.mean():.1e}")
    np.testing.assert_allclose(found[free], expected[free], rtol=2e-4, atol=1e-6)


def test_every_policy_has_a_value_test() -> None:
    assert {case.name for case in CASES} | set(ELSEWHERE) == set(policy_kinds.names())
