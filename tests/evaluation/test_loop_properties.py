"""Any prompt, feed, budget and policy: counts, the protected, and physical eviction against masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from budgeted import distinct, read, small, task
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Outcome
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import make_policy, policy_kinds
from cfkv.policies._budget import Budget

NAMES = [name for name in policy_kinds.names() if name != "full"]
SIMULATED = [name for name in NAMES if not small(name).compact and not small(name).ragged]
Tiny = Callable[[str, str], LoadedModel]


def check(outcome: Outcome, policy: Any, prompt: int, budget: Budget) -> None:
    for keep in outcome.keep_sets:
        protection = policy.protection(budget.slots, prompt, keep.step)
        first = max(protection.sinks, prompt if protection.prompt else 0)
        kept = {*range(min(first, keep.step)), *range(max(0, keep.step - protection.recent), keep.step)}
        assert kept <= set(keep.kept)
        limit = budget.total(len(kept))
        if not policy.ragged:
            assert len(keep.kept) <= limit
            assert len(keep.kept) == limit or not policy.fills
    if policy.schedule.kind == "per_step" and outcome.steps and budget.scope == "total":
        assert outcome.kept_peak <= budget.slots
    assert (outcome.status == "ok") == (outcome.reason is None)


@given(
    prompt=st.integers(1, 48),
    fed=st.integers(0, 38),
    slots=st.integers(1, 60),
    scope=st.sampled_from(["total", "total", "beyond_protected"]),
    defaults=st.booleans(),
    names=st.lists(st.sampled_from(NAMES), min_size=4, max_size=8, unique=True),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_any_budget(
    prompt: int,
    fed: int,
    slots: int,
    scope: Literal["total", "beyond_protected"],
    defaults: bool,  # noqa: FBT001
    names: list[str],
    make_tiny: Tiny,
) -> None:
    loaded, budget = make_tiny("qwen3", "sdpa"), Budget(slots=slots, scope=scope)
    ids = distinct(loaded, prompt + fed, seed=prompt)
    policies = [make_policy(name) if defaults else small(name) for name in names]
    reading = read(loaded, policies, ids, prompt, prompt=prompt)
    options: dict[str, Any] = {
        "record": True,
        "max_new_tokens": 1,
    }  # a token that came before would tie in layer 0
    own = [task(reading, index, ids, budget, **options) for index in range(len(names))]
    masked = [
        task(reading, index, ids, budget, simulate=True, **options)
        for index, name in enumerate(names)
        if name in SIMULATED
    ]
    steps: dict[int, list[Tensor]] = {}
    watch = lambda index, step, logits: steps.setdefault(index, []).append(logits.clone())  # noqa: E731
    outcomes = decode([*own, *masked], 5, watch)
    found = dict(zip(names, outcomes, strict=False))
    for policy, name in zip(policies, names, strict=True):
        assert found[name].status in ("ok", "budget_too_small", "never_evicted")
        check(found[name], policy, prompt, budget)
    for place, name in enumerate(name for name in names if name in SIMULATED):
        physical, simulated = found[name], outcomes[len(own) + place]
        assert (physical.status, physical.reason) == (simulated.status, simulated.reason)
        assert physical.keep_sets == simulated.keep_sets, name
        mine, theirs = (steps.get(index, []) for index in (names.index(name), len(own) + place))
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
        if min(physical.min_margin, simulated.min_margin) > 1e-4:
            assert physical.token_ids == simulated.token_ids, name
