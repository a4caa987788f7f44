"""The loop on other families, kernels and precisions, and models that it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from budgeted import SLOTS, TOTAL, draw, masked_logits, never_stop, read, small, task, visible
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.evaluation._loop import decode
from cfkv.models.decode import generate_greedy
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import policy_kinds
from cfkv.policies._budget import Budget

NAMES = policy_kinds.names()
Tiny = Callable[[str, str], LoadedModel]


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3"])
def test_a_budget_of_the_whole_text_is_plain_greedy_decoding(
    family: str, kernel: str, make_tiny: Tiny
) -> None:
    """All policies as arms of one batch."""
    loaded = make_tiny(family, kernel)
    ids = draw(loaded, 50)
    reading = read(loaded, [small(name) for name in NAMES], ids, 50)
    budget = Budget(slots=74)
    found = decode([task(reading, i, ids, budget, max_new_tokens=24) for i in range(len(NAMES))], 64)
    (plain,) = generate_greedy(loaded, [ids], max_new_tokens=[24], stops=[never_stop], chunk_size=512)
    assert plain.min_margin > 1e-4
    for name, outcome in zip(NAMES, found, strict=True):
        assert outcome.status == "ok", outcome.reason
        assert outcome.evictions == 0
        assert outcome.token_ids == plain.token_ids, name


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


@pytest.mark.parametrize("name", ["h2o", "tova", "epikv", "r_kv", "pyramidkv", "manifoldkv_prerotary"])
def test_bfloat16(name: str, llama: LoadedModel) -> None:
    """A smoke run: half precision is kept, and the budget too."""
    half = replace(llama, model=copy.deepcopy(llama.model).to(torch.bfloat16), dtype=torch.bfloat16)
    ids = draw(half, TOTAL)
    reading = read(half, [small(name)], ids, 70)
    found = decode([task(reading, 0, ids, Budget(slots=SLOTS), max_new_tokens=4)], 1)[0]
    assert found.status == "ok"
    assert len(found.token_ids) == 4
    assert reading.keys.dtype == torch.bfloat16
