"""What is kept under a budget, what is never evicted, and how budgets that cannot be held are reported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from budgeted import (
    PROMPT,
    SLOTS,
    TOTAL,
    draw,
    keep_sets,
    labels,
    masked_logits,
    never_stop,
    read,
    small,
    task,
    visible,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Outcome, Task
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import MaskScope, Policy, Schedule, View, make_policy, parameters, policy_kinds
from cfkv.policies._budget import Budget

NAMES = policy_kinds.names()
ACTING = [name for name in NAMES if name != "full"]
# No budget below the prompt holds for these.
PROTECTING = [name for name in NAMES if small(name).protection(SLOTS, PROMPT, TOTAL).prompt]
Tiny = Callable[[str, str], LoadedModel]


@pytest.fixture(scope="module")
def recorded(llama: LoadedModel) -> dict[str, Outcome]:
    """All policies on one text: the prompt is compressed, then forty tokens are fed and five generated."""
    ids = draw(llama, TOTAL)
    reading = read(llama, [small(name) for name in NAMES], ids, 70)
    tasks = [
        task(reading, i, ids, Budget(slots=SLOTS), max_new_tokens=5, record=True) for i in range(len(NAMES))
    ]
    return dict(zip(NAMES, decode(tasks, 64), strict=True))


@pytest.mark.parametrize("name", ACTING)
def test_every_eviction_leaves_the_budget_and_the_protected(
    name: str, recorded: dict[str, Outcome], llama: LoadedModel
) -> None:
    """Kept positions are unique, were seen, and were kept before; their number is the budget."""
    outcome, policy = recorded[name], small(name)
    assert outcome.status == "ok", outcome.reason
    rows, heads = policy.rows(llama.shape.num_layers, llama.shape.num_kv_heads)
    before: dict[tuple[int, int], tuple[int, set[int]]] = {}
    by_step: dict[int, list[int]] = {}
    for layer, head, step, kept in keep_sets(outcome):
        assert (layer >= 0, head >= 0) == (rows > 1, heads > 1)
        last, earlier = before.get((layer, head), (70, set(range(70))))
        assert list(kept) == sorted(set(kept))
        assert {*kept} <= earlier | {*range(last, step)}, "an evicted token came back"
        protection = policy.protection(SLOTS, PROMPT, step)
        first = max(protection.sinks, PROMPT if protection.prompt else 0)
        assert {*range(first), *range(step - protection.recent, step)} <= {*kept}
        before[layer, head] = step, {*kept}
        by_step.setdefault(step, []).append(len(kept))
    assert outcome.evictions == len(by_step)
    assert policy.schedule.kind != "once" or [*by_step] == [70]
    for counts in by_step.values():
        assert len(counts) == rows * heads
        if not policy.fills:
            assert max(counts) <= SLOTS
        elif policy.ragged:
            # Rounded shares of each layer: at most a token per head more or less.
            assert abs(sum(counts) - SLOTS * len(counts)) <= len(counts)
        else:
            assert set(counts) == {SLOTS}
    if policy.schedule.kind == "per_step" and policy.fills:
        # Fed one by one from 70 on, the last generated token is never fed: 110 + 4 - 70 evictions and the first.
        assert outcome.evictions == 45
        assert outcome.kept_peak == SLOTS
        assert outcome.kept_mean == SLOTS


def test_what_is_evicted_is_counted_by_hand(recorded: dict[str, Outcome]) -> None:
    """70 read, 44 fed: 54 tokens go one by one, the first ten at once."""
    assert recorded["h2o"].evicted == pytest.approx(70 + 44 - SLOTS)
    assert recorded["h2o"].steps == 44
    # Every 16 generated tokens: at 70 (read), then when (step - 70) % 16 == 0 above the budget.
    steps = sorted({step for *_, step, _ in keep_sets(recorded["r_kv"])})
    assert steps == [70, 86, 102]
    assert recorded["r_kv"].kept_peak == SLOTS + 15
    assert recorded["full"].kept_peak == 114
    assert recorded["full"].peak_bytes == 2 * 3 * 2 * 8 * 4 * 115


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64])
def test_contexts_shorter_than_windows_and_blocks(length: int, llama: LoadedModel) -> None:
    """Logits are those of a full cache with the same entries masked, whatever the length of the context."""
    ids, total = draw(llama, 100, seed=length), 100
    policies = [small(name) for name in NAMES if not small(name).compact]
    reading = read(llama, policies, ids, length)
    steps: dict[tuple[int, int], Tensor] = {}
    found = decode(
        [task(reading, i, ids, Budget(slots=54), record=True) for i in range(len(policies))],
        64,
        watch=lambda index, step, logits: steps.__setitem__((index, step), logits.clone()),
    )
    largest = 0.0
    for index, (policy, outcome) in enumerate(zip(policies, found, strict=True)):
        if policy.schedule.kind == "once" and length <= 54:
            assert outcome.status == "never_evicted"
            continue
        assert outcome.status == "ok", (policy.name, outcome.reason)
        expected = masked_logits(llama, ids, visible(outcome, llama, length, total))
        mine = torch.stack([steps[index, step] for step in range(length, total)])
        largest = max(largest, float((mine - expected[length:]).abs().max()))
    print(f"{length} tokens: largest difference {largest:.1e}")
    assert largest < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "phi3"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_logits_of_other_families(family: str, kernel: str, make_tiny: Tiny) -> None:
    """Biases, two kinds of layers with their own angles, fused projections; one batch of all policies."""
    loaded = make_tiny(family, kernel)
    ids = draw(loaded, TOTAL)
    policies = [small(name) for name in NAMES if not small(name).compact]
    reading = read(loaded, policies, ids, 70)
    steps: dict[tuple[int, int], Tensor] = {}
    found = decode(
        [task(reading, i, ids, Budget(slots=SLOTS), record=True) for i in range(len(policies))],
        64,
        watch=lambda index, step, logits: steps.__setitem__((index, step), logits.clone()),
    )
    for index, (policy, outcome) in enumerate(zip(policies, found, strict=True)):
        expected = masked_logits(loaded, ids, visible(outcome, loaded, 70, TOTAL))
        mine = torch.stack([steps[index, step] for step in range(70, TOTAL)])
        assert float((mine - expected[70:]).abs().max()) < 1e-4, policy.name


@pytest.mark.parametrize("name", PROTECTING)
def test_a_budget_not_above_what_is_protected_fails_alone(name: str, llama: LoadedModel) -> None:
    """Both numbers are named, and the row's company goes on as if it were alone."""
    ids = draw(llama, 90)
    reading = read(llama, [small(name), small("h2o")], ids, PROMPT + 10)
    recent = small(name).protection(30, PROMPT, PROMPT + 10).recent
    fine = task(reading, 1, ids, Budget(slots=30), max_new_tokens=8)
    (alone,) = decode([fine], 1)
    failed, other = decode([task(reading, 0, ids, Budget(slots=30)), fine], 2)
    assert failed.status == "budget_too_small"
    assert failed.reason is not None
    assert name in failed.reason
    assert "30 tokens" in failed.reason
    assert f"{PROMPT + recent} that are protected" in failed.reason
    assert failed.token_ids == []
    assert (other.status, other.token_ids) == ("ok", alone.token_ids)


def test_a_budget_may_prove_too_small_in_the_middle(llama: LoadedModel) -> None:
    """32 recent tokens are protected, but a context of 10 does not show that yet: the 21st token does."""
    ids = draw(llama, 60)
    reading = read(llama, [small("ahakv"), small("tova")], ids, 10)
    fine = task(reading, 1, ids, Budget(slots=20), max_new_tokens=8)
    (alone,) = decode([fine], 1)
    failed, other = decode([task(reading, 0, ids, Budget(slots=20)), fine], 2)
    assert failed.status == "budget_too_small"
    assert "20 tokens is not above the 21" in str(failed.reason)
    assert failed.steps == 10
    assert other.token_ids == alone.token_ids


def test_a_policy_that_never_acted_says_so(llama: LoadedModel) -> None:
    """40 read, 30 fed, a budget of 50: a policy that acts every 128 steps did nothing, one that acts more did."""
    ids = draw(llama, 70)
    reading = read(llama, [make_policy("r_kv"), small("r_kv"), small("full"), small("snapkv")], ids, 40)
    idle, acting, full, once = decode([task(reading, i, ids, Budget(slots=50)) for i in range(4)], 4)
    assert idle.status == once.status == "never_evicted"
    assert "r_kv never evicted, although 70 tokens outgrew a budget of 50 tokens" in str(idle.reason)
    assert "every 128 steps" in str(idle.reason)
    assert (acting.status, full.status) == ("ok", "ok")
    (enough,) = decode([task(reading, 0, ids, Budget(slots=70))], 1)
    assert enough.status == "ok"


@parameters
class Uneven(Policy):
    """Keeps another number of slots in each KV head, and does not say so."""

    mask_scope: ClassVar[MaskScope] = "kv_head"
    name: ClassVar[str] = "uneven"

    @property
    def schedule(self) -> Schedule:
        return Schedule("every_m", 4)

    def score(self, view: View) -> Tensor:
        return view.positions.float()

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        layers, heads = scores.shape[:2]
        return room - torch.arange(heads).expand(layers, heads)


def test_a_policy_that_evicts_unequally_must_say_so(llama: LoadedModel) -> None:
    """Named with the remedy; the slots of a physical table are freed in step."""
    ids = draw(llama, 70)
    reading = read(llama, [Uneven()], ids, 20)
    with pytest.raises(CfkvError, match=r"policy uneven evicts 4 to 5 .* `ragged = True`"):
        decode([task(reading, 0, ids, Budget(slots=24))], 1)


@pytest.mark.parametrize("name", ["oracle", "anti_oracle", "shuffled_oracle"])
def test_policies_made_from_labels_ask_for_them(name: str, llama: LoadedModel) -> None:
    """By name, and with what to run."""
    ids = draw(llama, 70)
    reading = read(llama, [small(name)], ids, 50)
    with pytest.raises(CfkvError, match=f"policy {name} .*labels.*cfkv label"):
        decode([task(reading, 0, ids, Budget(slots=45), labels=None)], 1)


def test_models_whose_attention_the_cache_does_not_compute_are_refused(
    make_tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft cap is named, with the layers that have it."""
    loaded = make_tiny("gemma3", "sdpa")
    ids = draw(loaded, 30)
    reading = read(loaded, [small("h2o")], ids, 20)
    for block in loaded.model.model.layers[1:3]:  # type: ignore[union-attr,index]
        monkeypatch.setattr(block.self_attn, "attn_logit_softcapping", 50.0)
    with pytest.raises(CfkvError, match=r"layers 1-2 has soft-capped logits"):
        decode([task(reading, 0, ids, Budget(slots=12))], 1)


def test_the_table_and_the_keep_sets_agree(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a policy is shown at each eviction is what the last keep set left and what came since."""
    ids = draw(llama, TOTAL)
    for name in ("h2o", "tova", "streaming_llm", "r_kv", "raas", "lazy_eviction"):
        shown: list[Tensor] = []
        kind = policy_kinds.get(name)
        score = kind.score

        def watching(self: Any, view: View, score: Any = score, shown: list[Tensor] = shown) -> Tensor:
            shown.append(view.positions.masked_fill(~view.valid, -1).clone())
            return score(self, view)

        monkeypatch.setattr(kind, "score", watching)
        reading = read(llama, [small(name)], ids, PROMPT)
        (outcome,) = decode([task(reading, 0, ids, Budget(slots=50), record=True)], 1)
        before: dict[tuple[int, int], tuple[int, set[int]]] = {}
        moments = sorted({keep.step for keep in outcome.keep_sets})
        assert len(shown) == len(moments)
        for layer, head, step, kept in keep_sets(outcome):
            last, earlier = before.get((layer, head), (PROMPT, {*range(PROMPT)}))
            table = shown[moments.index(step)][max(layer, 0), max(head, 0)].tolist()
            assert sorted(place for place in table if place >= 0) == sorted(earlier | {*range(last, step)})
            before[layer, head] = step, {*kept}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    context=st.integers(1, 60),
    fed=st.integers(0, 40),
    slots=st.integers(8, 70),
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
    size=st.integers(1, 4),
)
def test_any_sizes(
    context: int, fed: int, slots: int, names: list[str], size: int, llama: LoadedModel
) -> None:
    """Ends with a status; at "ok" the tokens are there, nothing is above the budget after an eviction."""
    ids = draw(llama, context + fed, seed=context)
    reading = read(llama, [small(name) for name in names], ids, context)
    budget = Budget(slots=slots)
    tasks = [task(reading, i, ids, budget, max_new_tokens=6, record=True) for i in range(len(names))]
    for name, outcome in zip(names, decode(tasks, size), strict=True):
        policy = small(name)
        assert outcome.status in ("ok", "budget_too_small", "never_evicted"), outcome.reason
        if outcome.status == "budget_too_small":
            most = max(
                policy.protection(slots, min(PROMPT, context), s).count(PROMPT, s) for s in (context, 110)
            )
            assert slots <= most
            continue
        assert len(outcome.token_ids) == 6
        assert outcome.steps == fed + 5
        assert outcome.kept_sum <= outcome.steps * (context + fed + 5)
        if policy.schedule.kind != "never" and not policy.ragged:
            assert all(len(kept) <= slots for *_, kept in keep_sets(outcome))
        if context + fed + 5 <= slots:
            assert outcome.evictions == 0


def test_a_task_of_nothing(llama: LoadedModel) -> None:
    """Nothing fed and nothing to generate is no error."""
    reading = read(llama, [small("h2o")], draw(llama, 30), 30)
    (outcome,) = decode([Task(reading=reading, index=0, budget=None, max_new_tokens=0, stop=never_stop)], 1)
    assert (outcome.token_ids, outcome.steps, outcome.kept_mean, outcome.status) == ([], 0, None, "ok")


@pytest.mark.parametrize("name", ["h2o", "tova", "epikv", "r_kv", "pyramidkv", "manifoldkv_prerotary"])
def test_bfloat16(name: str, llama: LoadedModel) -> None:
    """A smoke run: half precision is kept, and the budget too."""
    half = replace(llama, model=copy.deepcopy(llama.model).to(torch.bfloat16), dtype=torch.bfloat16)
    ids = draw(half, TOTAL)
    reading = read(half, [small(name)], ids, 70)
    found = decode([task(reading, 0, ids, Budget(slots=SLOTS), max_new_tokens=4, labels=labels(TOTAL))], 1)[0]
    assert found.status == "ok"
    assert len(found.token_ids) == 4
    assert reading.keys.dtype == torch.bfloat16
