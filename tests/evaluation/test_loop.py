"""The decode loop against a full cache in which the evicted entries are masked, and against itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from budgeted import CONTEXT, PROMPT, SLOTS, TOTAL, draw, masked_logits, read, small, task, visible
from torch import Tensor

from cfkv.evaluation._loop import decode
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import policy_kinds
from cfkv.policies._budget import Budget

NAMES = policy_kinds.names()
Tiny = Callable[[str, str], LoadedModel]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_a_full_cache_with_the_same_entries_masked(
    name: str, family: str, make_tiny: Tiny
) -> None:
    loaded, policy = make_tiny(family, "sdpa"), small(name)
    ids = draw(loaded, TOTAL)
    start = CONTEXT if policy.schedule.kind == "once" else PROMPT
    reading = read(loaded, [policy], ids, start)
    steps: dict[int, Tensor] = {}
    (outcome,) = decode(
        [task(reading, 0, ids, Budget(slots=SLOTS), record=True)],
        1,
        watch=lambda index, step, logits: steps.__setitem__(step, logits.clone()),
    )
    assert outcome.status == "ok", outcome.reason
    assert (outcome.evictions > 0) == (policy.schedule.kind != "never")
    expected = masked_logits(loaded, ids, visible(outcome, loaded, start, TOTAL))
    found = torch.stack([steps[step] for step in range(start, TOTAL)])
    gap = float((found - expected[start:]).abs().max())
    print(f"{name} on {family}: largest difference {gap:.1e}")
    if not policy.compact:
        assert gap < 1e-4


def test_layers_of_different_budgets_are_cut_physically(make_tiny: Tiny) -> None:
    """PyramidKV: each layer's slots are those that it keeps and those of the tokens to come."""
    loaded, policy = make_tiny("llama", "sdpa"), small("pyramidkv")
    ids = draw(loaded, TOTAL)
    reading = read(loaded, [policy], ids, CONTEXT)
    (outcome,) = decode([task(reading, 0, ids, Budget(slots=SLOTS), record=True)], 1)
    assert outcome.eviction == "physical"
    shape = loaded.shape
    kept = {keep.layer: len(keep.kept) for keep in outcome.keep_sets}
    assert len(kept) == shape.num_layers
    assert len(set(kept.values())) > 1
    slots = sum(count + TOTAL - CONTEXT + 1 for count in kept.values())  # one more: max_new_tokens
    assert outcome.peak_bytes == slots * 2 * shape.num_kv_heads * shape.head_dim * 4
