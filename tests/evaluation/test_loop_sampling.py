"""Sampled tokens: a function of the seed, and distributed as the softmax says."""

from __future__ import annotations

import torch
from budgeted import SLOTS, draw, never_stop, read, small

from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Noise, Task
from cfkv.models.loading import LoadedModel
from cfkv.policies._budget import Budget


def sampled(loaded: LoadedModel, seeds: list[int], size: int, temperature: float = 1.0) -> list[list[int]]:
    """Twelve tokens after one text, per seed."""
    ids = draw(loaded, 70)
    reading = read(loaded, [small("h2o")], ids, 70)
    tasks = [
        Task(
            reading=reading,
            index=0,
            budget=Budget(slots=SLOTS),
            max_new_tokens=12,
            stop=never_stop,
            noise=Noise(seed, temperature),
        )
        for seed in seeds
    ]
    return [outcome.token_ids for outcome in decode(tasks, size)]


def test_the_seed_alone_decides(llama: LoadedModel) -> None:
    """Not the place in a batch, nor who else is in it; another seed gives another text."""
    one = sampled(llama, [1, 2, 3, 1], 4)
    assert one[0] == one[3]
    assert len({tuple(ids) for ids in one}) == 3
    assert sampled(llama, [3, 2, 1], 1) == [one[2], one[1], one[0]]


def test_a_cold_sample_is_greedy(llama: LoadedModel) -> None:
    """Noise is nothing beside logits divided by a small temperature."""
    reading = read(llama, [small("h2o")], draw(llama, 70), 70)
    greedy = Task(reading=reading, index=0, budget=Budget(slots=SLOTS), max_new_tokens=12, stop=never_stop)
    assert sampled(llama, [5], 1, temperature=1e-4) == [decode([greedy], 1)[0].token_ids]


def test_frequencies_are_those_of_the_softmax() -> None:
    """Five tokens, 4,000 draws, chi-square of 4 degrees of freedom: 18.5 is passed once in a thousand."""
    logits, count = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5]), 4000
    for temperature in (0.6, 1.0, 1.7):
        one = Noise(7, temperature)
        many = [Noise(seed, temperature) for seed in range(count)]
        expected = (logits / temperature).softmax(dim=-1) * count
        for noises in ([one] * count, many):
            draws = torch.tensor([int(noise.perturb(logits).argmax()) for noise in noises])
            found = draws.bincount(minlength=5)
            assert float(((found - expected) ** 2 / expected).sum()) < 18.5
        # Not as if all had one temperature.
        other = logits.softmax(dim=-1) * count
        assert temperature == 1.0 or float(((found - other) ** 2 / other).sum()) > 100
