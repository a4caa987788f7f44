"""Counts after evictions, what is protected, slots that are used again, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from budgeted import distinct, draw, read, small, task
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import KeepSet, Outcome
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import MaskScope, Policy, View, make_policy, policy_kinds
from cfkv.policies._budget import Budget

NAMES = policy_kinds.names()
Tiny = Callable[[str, str], LoadedModel]
PROMPT, CONTEXT, LENGTH, SLOTS = 24, 52, 72, 44


def run(name: str, loaded: LoadedModel, **options: object) -> Outcome:
    policy = small(name)
    ids = distinct(loaded, LENGTH, seed=7)
    reading = read(
        loaded, [policy], ids, CONTEXT if policy.schedule.kind == "once" else PROMPT, prompt=PROMPT
    )
    own = task(reading, 0, ids, Budget(slots=SLOTS), record=True, max_new_tokens=6, **options)
    return decode([own], 1)[0]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "full"])
def test_counts_and_the_protected(name: str, make_tiny: Tiny) -> None:
    """What is counted and what is kept, by the keep sets."""
    loaded, policy = make_tiny("qwen3", "sdpa"), small(name)
    outcome = run(name, loaded)
    assert (outcome.status, outcome.evictions > 0) == ("ok", True)
    steps = sorted({keep.step for keep in outcome.keep_sets})
    assert len(steps) == outcome.evictions
    layers, kv_heads = policy.rows(loaded.shape.num_layers, loaded.shape.num_kv_heads)
    last: dict[tuple[int, int], set[int]] = {}
    for step in steps:
        own = [keep for keep in outcome.keep_sets if keep.step == step]
        assert [(keep.layer, keep.kv_head) for keep in own] == [
            (layer if layers > 1 else -1, head if kv_heads > 1 else -1)
            for layer in range(layers)
            for head in range(kv_heads)
        ]
        protection = policy.protection(SLOTS, PROMPT, step)
        first = max(protection.sinks, PROMPT if protection.prompt else 0)
        kept = {*range(first), *range(max(0, step - protection.recent), step)}
        for keep in own:
            assert keep.kept == sorted(set(keep.kept))
            assert kept <= set(keep.kept) <= set(range(step))
            before = last.get((keep.layer, keep.kv_head), set(range(step)))
            assert set(keep.kept) <= before | set(range(max(before, default=0) + 1, step))
            last[keep.layer, keep.kv_head] = set(keep.kept)
        counts = [len(keep.kept) for keep in own]
        if policy.ragged:
            # PyramidKV's floors; Ada-KV's shares add up in each layer.
            assert abs(sum(counts) - SLOTS * len(counts)) <= (len(counts) if policy.by_layer else 0)
        elif policy.fills:
            assert counts == [SLOTS] * len(counts)
        else:
            assert max(counts) <= SLOTS
    most = SLOTS if policy.schedule.kind == "per_step" else SLOTS + policy.schedule.every
    if policy.schedule.kind != "once":
        assert outcome.kept_peak <= most


@pytest.mark.parametrize("name", [name for name in NAMES if not small(name).ragged])
def test_a_slot_that_is_used_again_has_no_residue(name: str, make_tiny: Tiny) -> None:
    """The simulated run never uses a slot twice."""
    loaded = make_tiny("qwen3", "sdpa")
    if small(name).compact:
        pytest.skip("it cannot be simulated by masks")
    physical, simulated = run(name, loaded), run(name, loaded, simulate=True)
    acts = name != "full"
    assert (physical.eviction, simulated.eviction) == ("physical", "simulated")
    assert (physical.evictions > 0) == acts
    assert physical.keep_sets == simulated.keep_sets
    assert physical.token_ids == simulated.token_ids
    assert min(physical.min_margin, simulated.min_margin) > 1e-4  # so that no tie hides a difference
    assert (physical.kept_peak, physical.kept_mean) == (simulated.kept_peak, simulated.kept_mean)
    assert simulated.peak_bytes is None


class Uneven(Policy):
    """Leaves the second KV head one slot less."""

    name: ClassVar[str] = "uneven"
    mask_scope: ClassVar[MaskScope] = "kv_head"

    def score(self, view: View) -> Tensor:
        return view.positions.float()

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        counts = torch.full(scores.shape[:-1], room)
        counts[:, 1] -= 1
        return counts


@pytest.mark.parametrize("stop", [20, 40], ids=["later", "at the end of the prompt"])
def test_uneven_counts_must_be_declared(stop: int, make_tiny: Tiny) -> None:
    loaded = make_tiny("llama", "sdpa")
    ids = draw(loaded, 60)
    own = task(read(loaded, [Uneven()], ids, stop, prompt=stop), 0, ids, Budget(slots=30))
    with pytest.raises(CfkvError, match=r"policy uneven .*must declare `ragged = True`"):
        decode([own], 1)


def test_a_budget_below_what_is_protected_stops_its_own_row_alone(make_tiny: Tiny) -> None:
    """At the end of the prompt, and in the middle of a decode."""
    loaded = make_tiny("llama", "sdpa")
    ids = distinct(loaded, 60)
    policies = [make_policy("epikv"), make_policy("snapkv_decode", {"every": 4}), make_policy("tova")]
    reading = read(loaded, policies, ids, 24, prompt=24)
    budgets = [(0, 16), (0, 26), (1, 8), (1, 30), (2, 16), (2, 40)]
    tasks = [task(reading, index, ids, Budget(slots=slots), record=True) for index, slots in budgets]
    alone = [decode([own], 1)[0] for own in tasks]
    found = decode(tasks, 8)
    assert [outcome.status for outcome in found] == ["budget_too_small"] * 3 + ["ok"] * 3
    reasons = [outcome.reason or "" for outcome in found]
    assert reasons[0].startswith("policy epikv: a budget of 16 tokens is not above the 24 that are protected")
    # 26 // 4 = 6 recent tokens beside the prompt: 30 of 27, which all are
    assert reasons[1].startswith("policy epikv: a budget of 26 tokens is not above the 27 that are protected")
    assert reasons[2].startswith("policy snapkv_decode: a budget of 8 tokens is not above the 8 that are")
    assert found[1].steps == 2  # 24 and 2 more fit
    for mine, theirs in zip(found, alone, strict=True):
        assert (mine.token_ids, mine.keep_sets) == (theirs.token_ids, theirs.keep_sets)
        assert (mine.status, mine.reason, mine.steps) == (theirs.status, theirs.reason, theirs.steps)


@pytest.mark.parametrize(
    ("name", "options", "generated", "status"),
    [
        ("r_kv", {"every": 64}, 30, "never_evicted"),
        ("snapkv", {}, 30, "never_evicted"),
        ("r_kv", {"every": 64}, 8, "ok"),  # it fits
        ("r_kv", {"every": 16}, 30, "ok"),
        ("full", {}, 30, "ok"),
    ],
)
def test_never_evicted(name: str, options: dict, generated: int, status: str, make_tiny: Tiny) -> None:
    loaded = make_tiny("llama", "sdpa")
    ids = draw(loaded, 40 + generated)
    own = task(read(loaded, [make_policy(name, options)], ids, 40, prompt=40), 0, ids, Budget(slots=50))
    (outcome,) = decode([own], 1)
    assert outcome.status == status
    if status != "ok":
        assert f"{70} tokens outgrew a budget of 50 tokens" in (outcome.reason or "")


@pytest.mark.parametrize("context", [1, 2, 3, 5, 31, 32, 33, 64])
def test_short_contexts(context: int, make_tiny: Tiny) -> None:
    """Every policy with its own defaults, windows of 32 or 400 included: one batch against one at a time."""
    loaded = make_tiny("qwen3", "sdpa")
    ids = distinct(loaded, context + 12, seed=9)
    policies = [make_policy(name) for name in NAMES]
    reading = read(loaded, policies, ids, context, prompt=context)
    budget = Budget(slots=context + 5)
    tasks = [task(reading, index, ids, budget, record=True) for index in range(len(NAMES))]
    for policy, outcome in zip(policies, decode(tasks, 100), strict=True):
        assert outcome.status in ("ok", "budget_too_small", "never_evicted"), outcome
        last: dict[tuple[int, int], KeepSet] = {(k.layer, k.kv_head): k for k in outcome.keep_sets}
        for keep in last.values():
            assert len(keep.kept) <= budget.slots
        if policy.schedule.kind == "per_step" and not policy.protection(budget.slots, context, 99).recent:
            assert outcome.status == "ok", (policy.name, outcome.reason)
            assert outcome.evictions > 0


def test_rows_with_texts_shorter_than_the_window(make_tiny: Tiny) -> None:
    """How many queries a row has is its own, also after others left."""
    loaded = make_tiny("llama", "sdpa")
    policy, tasks = make_policy("scissorhands", {"recent": 2, "drop": 0.25}), []
    for start, length in ((20, 26), (19, 25), (2, 34), (30, 60)):
        ids = distinct(loaded, length, seed=start)
        reading = read(loaded, [policy], ids, start, prompt=start)
        tasks.append(task(reading, 0, ids, Budget(slots=16), record=True))
    for mine, own in zip(decode(tasks, 4), tasks, strict=True):
        (expected,) = decode([own], 1)
        assert expected.evictions > 0
        assert (mine.keep_sets, mine.token_ids) == (expected.keep_sets, expected.token_ids)


@pytest.mark.parametrize("slots", [0, 1, 9])
@pytest.mark.parametrize("name", ["lagkv", "streaming_llm", "random", "snapkv_decode"])
def test_a_budget_beside_the_protected(name: str, slots: int, make_tiny: Tiny) -> None:
    """What is protected may grow and shrink: a table has room for the most."""
    loaded = make_tiny("llama", "sdpa")
    ids = draw(loaded, 100)
    policy = make_policy(
        name, {"lagkv": {"sinks": 2, "lag": 20}, "snapkv_decode": {"every": 16}}.get(name, {})
    )
    reading = read(loaded, [policy], ids, 24, prompt=24)
    budget = Budget(slots=slots, scope="beyond_protected")
    (outcome,) = decode([task(reading, 0, ids, budget, record=True, max_new_tokens=3)], 1)
    assert outcome.status == "ok", outcome.reason
    for keep in outcome.keep_sets:
        protected = policy.protection(slots, 24, keep.step).count(24, keep.step)
        assert len(keep.kept) == protected + slots


@pytest.mark.parametrize("name", ["oracle", "anti_oracle", "shuffled_oracle"])
@pytest.mark.parametrize("stop", [20, 40])
def test_policies_made_from_labels_say_what_they_miss(name: str, stop: int, make_tiny: Tiny) -> None:
    loaded = make_tiny("llama", "sdpa")
    ids = draw(loaded, 50)
    own = task(read(loaded, [make_policy(name)], ids, stop, prompt=8), 0, ids, Budget(slots=30), labels=None)
    with pytest.raises(CfkvError, match=rf"policy {name} is made from labels.*labels"):
        decode([own], 1)
