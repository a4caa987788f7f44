"""Samples: seeds, and the frequencies of a softmax at a temperature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from budgeted import distinct, read, small, task
from scipy.stats import chi2, chisquare

from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Noise, Task
from cfkv.models.loading import LoadedModel
from cfkv.policies._budget import Budget

DRAWS = 4000


def sampled(loaded: LoadedModel, seed: int, temperature: float = 1.0, slots: int = 24, new: int = 16) -> Task:
    ids = distinct(loaded, 20)
    reading = read(loaded, [small("tova")], ids, 20)
    noise = Noise(seed, temperature)
    return task(reading, 0, ids, Budget(slots=slots), max_new_tokens=new, noise=noise)


def test_a_seed_gives_its_tokens_in_any_batch(llama: LoadedModel) -> None:
    alone = [decode([sampled(llama, seed)], 1)[0].token_ids for seed in (1, 2, 3, 1)]
    assert alone[0] == alone[3]
    assert len({tuple(tokens) for tokens in alone}) == 3
    together = decode([sampled(llama, seed) for seed in (3, 2, 1)], 3)
    assert [outcome.token_ids for outcome in together] == alone[2::-1]


def test_arms_are_compared_on_the_same_draws(llama: LoadedModel) -> None:
    """Up to the first eviction two budgets write the same sample, and then part."""
    tight, roomy = decode([sampled(llama, 5, new=40), sampled(llama, 5, slots=99, new=40)], 2)
    assert tight.evictions > 0 == roomy.evictions
    assert tight.token_ids[:5] == roomy.token_ids[:5]  # the fifth new token is chosen before 24 are exceeded
    assert tight.token_ids != roomy.token_ids


def test_a_temperature_near_zero_is_greedy(llama: LoadedModel) -> None:
    own = sampled(llama, 1, temperature=1e-6)
    ids = distinct(llama, 20)
    (greedy,) = decode([task(own.reading, 0, ids, Budget(slots=24), max_new_tokens=16)], 1)
    assert greedy.min_margin > 1e-3
    assert decode([own], 1)[0].token_ids == greedy.token_ids


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_of_the_first_token(temperature: float, llama: LoadedModel) -> None:
    """Rare tokens together, so that each class expects ten or more; a right sampler fails once in a million seeds."""
    ids = distinct(llama, 20)
    reading = read(llama, [small("full")], ids, 20)
    tasks = [
        task(reading, 0, ids, None, noise=Noise(seed, temperature), max_new_tokens=1) for seed in range(DRAWS)
    ]
    drawn = [outcome.token_ids[0] for outcome in decode(tasks, 500)]
    with torch.inference_mode():
        logits = llama.model(torch.tensor([ids])).logits[0, -1].double()
    expected = DRAWS * np.exp((logits - logits.max()).numpy() / temperature)
    expected /= expected.sum() / DRAWS
    counts = np.bincount(drawn, minlength=len(expected))
    common = expected >= 10
    classes = [np.append(values[common], values[~common].sum()) for values in (counts, expected)]
    assert common.sum() > 5
    result = chisquare(*classes)
    print(f"temperature {temperature}: chi-square {result.statistic:.1f} on {common.sum()} degrees")
    assert result.statistic < chi2.isf(1e-6, common.sum())


def test_draws_of_a_sequence_do_not_repeat() -> None:
    """Each call is a new draw: over equal logits, two neighbours agree as often as chance says."""
    noise, logits = Noise(0, 1.0), torch.zeros(50)
    tokens = np.array([int(noise.perturb(logits).argmax()) for _ in range(DRAWS)])
    agree = int((tokens[1:] == tokens[:-1]).sum())
    # binomial(3999, 1 / 50): mean 80, standard deviation 8.9
    assert abs(agree - 80) < 5 * 8.9
    assert chisquare(np.bincount(tokens, minlength=50)).pvalue > 1e-6
