"""Training batches for the built-in reasoner: programs as token ids, targets and loss weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cfkv.problems.registers import (
    BOX_CLOSE,
    BOX_OPEN,
    END_THINK,
    EOS,
    NUM_SLOTS,
    PAD,
    VOCABULARY,
    planted_truth,
    training_program,
)

TOKEN_IDS = {word: index for index, word in enumerate(VOCABULARY)}
FUSED_WORDS = frozenset(word for word in VOCABULARY if word[0] == "R" and "=" in word)
VALUE_WEIGHT = 4.0
ANSWER_WEIGHT = 5.0


@dataclass(frozen=True)
class Batch:
    """Next-token training data, right-padded.

    input_ids, targets : (B, T) int64; targets[:, t] is the word after input_ids[:, t].
    weights : (B, T) float32; the weight of the loss on each target, 0 on prompt, hidden spans and padding.
    mask : (B, 1, T, T) bool, which row attends to which column; None for plain causal attention.
    """

    input_ids: Tensor
    targets: Tensor
    weights: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Shares:
    """Shares of the samples, 0 to 1, in which reasoning is taken away from the answer.

    occluded : windows of the reasoning are attended pad tokens.
    dropped : the text is whole, but `</think>` and the answer do not attend to some of it.
    """

    occluded: float
    dropped: float


def _hidden_spans(generator: random.Random, num_tokens: int) -> list[tuple[int, int]]:
    """One to three [start, stop) windows of 1 to 48 of `num_tokens` reasoning tokens, half of them short."""
    spans = []
    for _ in range(generator.randint(1, 3)):
        width = min(generator.randint(1, 16 if generator.random() < 0.5 else 48), num_tokens)
        start = generator.randint(0, num_tokens - width)
        spans.append((start, start + width))
    return spans


def _lost_slots(needed: Sequence[bool], fused: Sequence[str | None], missing: set[int]) -> set[str]:
    """Tags (`R1` to `R4`) of the facts with a needed position among the `missing`.

    `fused` holds the tag at the position of each fused fact, where a fact ends, and None elsewhere.
    """
    lost = set()
    hit = False
    for at, tag in enumerate(fused):
        hit = hit or (needed[at] and at in missing)
        if tag is not None:
            if hit:
                lost.add(tag)
            hit = False
    return lost


@dataclass(frozen=True)
class _Sample:
    """One program as words: what is shown, what is learned, the loss weight of each learned word.

    `dropped` are the positions that everything from position `boundary` (`</think>`) on does not attend to.
    """

    shown: list[str]
    learned: list[str]
    weights: list[float]
    boundary: int
    dropped: set[int]


def _dropped(generator: random.Random, planted: Sequence[bool], fused: Sequence[str | None]) -> set[int]:
    """Reasoning positions to drop: some windows, or all but most of the planted entries and the latest."""
    num_tokens = len(planted)
    if generator.random() < 0.4:
        return {at for start, stop in _hidden_spans(generator, num_tokens) for at in range(start, stop)}
    latest = num_tokens - generator.randint(0, 48)
    kept: set[int] = set()
    fact: set[int] = set()
    for at in range(num_tokens):
        if planted[at]:
            fact.add(at)
        if fused[at] is not None:
            if generator.random() < 0.85:
                kept |= fact
            fact = set()
    return {at for at in range(latest) if at not in kept}


def _draw_sample(generator: random.Random, num_lines: int, num_slots: int, shares: Shares) -> _Sample:
    program = training_program(generator, num_lines, num_slots)
    prompt, reasoning, answer = program.prompt_words(), program.reasoning_words(), program.answer_words()
    shown = list(reasoning)
    weights = [VALUE_WEIGHT if word.isdigit() or word in FUSED_WORDS else 1.0 for word in reasoning]
    truth = planted_truth(reasoning)
    fused = [word[:2] if mark else None for word, mark in zip(reasoning, truth.fused, strict=True)]
    kind = generator.random()
    occluded = kind < shares.occluded
    lost: set[str] = set()
    dropped: set[int] = set()
    if occluded:
        spans = _hidden_spans(generator, len(reasoning))
        hidden = {at for start, stop in spans for at in range(start, stop)}
        for at in hidden:
            shown[at] = PAD
        weights[min(hidden) :] = [0.0] * (len(reasoning) - min(hidden))
        lost = _lost_slots(truth.occlusion.tolist(), fused, hidden)
    elif kind < shares.occluded + shares.dropped:
        missing = _dropped(generator, truth.cache.tolist(), fused)
        lost = _lost_slots(truth.cache.tolist(), fused, missing)
        dropped = {at + len(prompt) for at in missing}
        if generator.random() < 0.3:
            dropped |= set(range(len(prompt)))
    answer = [f"{word[:2]}=?" if word[:2] in lost else word for word in answer]
    tail = [END_THINK, BOX_OPEN, *answer, BOX_CLOSE, EOS]
    weights += [0.0 if occluded else 1.0, 1.0, *(ANSWER_WEIGHT for _ in answer), 1.0, 1.0]
    return _Sample(
        shown=[*prompt, *shown, *tail],
        learned=[*prompt, *reasoning, *tail],
        weights=[*(0.0 for _ in prompt), *weights],
        boundary=len(prompt) + len(reasoning),
        dropped=dropped,
    )


def draw_batch(generator: random.Random, *, lines: tuple[int, int], num_tokens: int, shares: Shares) -> Batch:
    """Draw about `num_tokens` tokens of programs that all have the same number of lines.

    Parameters
    ----------
    lines : (int, int)
        Smallest and largest number of lines; short programs have fewer slots.
    shares : Shares
        How many samples hide or drop reasoning. The answer to a slot is `Rk=?` if its tag, digit or fused
        fact is hidden, or its digit or fused fact dropped.
    """
    num_lines = generator.randint(*lines)
    num_slots = min(NUM_SLOTS, num_lines - 3)
    batch_size = max(1, round(num_tokens / (20 * num_lines)))
    samples = [_draw_sample(generator, num_lines, num_slots, shares) for _ in range(batch_size)]
    length = max(len(sample.shown) for sample in samples) - 1
    input_ids = torch.full((batch_size, length), TOKEN_IDS[PAD])
    targets = torch.full((batch_size, length), TOKEN_IDS[PAD])
    weights = torch.zeros(batch_size, length)
    for row, sample in enumerate(samples):
        size = len(sample.shown) - 1
        input_ids[row, :size] = torch.tensor([TOKEN_IDS[word] for word in sample.shown[:-1]])
        targets[row, :size] = torch.tensor([TOKEN_IDS[word] for word in sample.learned[1:]])
        weights[row, :size] = torch.tensor(sample.weights[1:])
    mask = None
    if any(sample.dropped for sample in samples):
        mask = torch.ones(length, length, dtype=torch.bool).tril().repeat(batch_size, 1, 1, 1)
        for row, sample in enumerate(samples):
            mask[row, 0, sample.boundary :, sorted(sample.dropped)] = False
    return Batch(input_ids, targets, weights, mask)
