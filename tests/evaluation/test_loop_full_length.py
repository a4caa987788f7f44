"""With room for every token: greedy decoding, and the scores of the text read at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from budgeted import PROMPT, distinct, draw, labels, never_stop, read, small, task
from torch import Tensor

from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Row, reads
from cfkv.models.budget_cache import BudgetCache
from cfkv.models.decode import generate_greedy
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import Policy, View, policy_kinds
from cfkv.policies._budget import Budget

NAMES = policy_kinds.names()
NEW = 40
LENGTH, STEPS = 84, (PROMPT + 1, PROMPT + 17, 83)


def models(builtin: LoadedModel, make_tiny: Callable[[str, str], LoadedModel]) -> list[LoadedModel]:
    return [builtin, make_tiny("llama", "sdpa")]


@pytest.mark.parametrize("which", [0, 1], ids=["builtin", "llama"])
@pytest.mark.parametrize("length", [5, PROMPT])
@pytest.mark.parametrize("more", [0, 7])
def test_every_policy_decodes_greedily(
    which: int, length: int, more: int, builtin: LoadedModel, make_tiny: Callable[[str, str], LoadedModel]
) -> None:
    """All policies in one batch; the last token is never cached, so that the tightest budget is one less."""
    loaded = models(builtin, make_tiny)[which]
    ids = draw(loaded, length, seed=3)
    (expected,) = generate_greedy(loaded, [ids], max_new_tokens=[NEW], stops=[never_stop], chunk_size=7)
    reading = read(loaded, [small(name) for name in NAMES], ids, length)
    budget = Budget(slots=length + NEW - 1 + more)
    options = {"max_new_tokens": NEW, "labels": labels(length + NEW)}
    outcomes = decode([task(reading, index, ids, budget, **options) for index in range(len(NAMES))], 100)
    assert expected.min_margin > 1e-4  # or the tokens could differ by rounding
    for name, outcome in zip(NAMES, outcomes, strict=True):
        assert (outcome.status, outcome.evictions, outcome.evicted) == ("ok", 0, 0), name
        assert outcome.token_ids == expected.token_ids, name
        assert outcome.min_margin == pytest.approx(expected.min_margin, abs=1e-4)
        assert (outcome.kept_peak, outcome.steps) == (length + NEW - 1, NEW - 1)


def scored(policy: Policy, view: View) -> tuple[Tensor, Tensor]:
    """Scores, and 1 where protected, of the tokens in order, [l, g, N]."""
    places = view.positions.masked_fill(~view.valid, 10**9).argsort(dim=-1)[..., : view.step]
    assert bool((view.positions.gather(-1, places) == torch.arange(view.step)).all())
    return policy.score(view).gather(-1, places), view.protected.gather(-1, places).float()


@pytest.mark.parametrize("name", NAMES)
def test_scores_online_are_those_of_the_text_read_at_once(
    name: str, make_tiny: Callable[[str, str], LoadedModel]
) -> None:
    """The table's slots are filled in an order of their own on each layer and head."""
    loaded, policy = make_tiny("qwen3", "sdpa"), small(name)
    ids = distinct(loaded, LENGTH, seed=4)
    row = Row(task(read(loaded, [policy], ids, PROMPT), 0, ids, Budget(slots=LENGTH)))
    row.prepare()
    cache = BudgetCache(loaded, 1, row.slots, reads([policy], rotating=policy.compact))
    row.load(cache, 0)
    row.free = row.free.gather(
        -1, torch.rand(row.free.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    )
    expected = {
        step: scored(policy, read(loaded, [policy], ids, step, 13).view(0, LENGTH, labels(LENGTH)))
        for step in STEPS
    }
    worst = 0.0
    with torch.inference_mode(), cache.attached():
        while row.take(torch.zeros(3), torch.zeros(2)) and row.step < LENGTH:
            columns = [torch.tensor([value]) for value in (row.pending, row.step, row.rotary_position())]
            cache.step(columns[0], row.next_slots()[:, None], columns[1], columns[2])
            row.after(cache)
            if row.step not in STEPS:
                continue
            for mine, theirs in zip(scored(policy, row._view(cache)), expected[row.step], strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
                worst = max(worst, float((mine - theirs).abs().max()))
    assert row.step == LENGTH
    print(f"{name}: largest difference {worst:.1e}")
