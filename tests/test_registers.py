"""The registers task: programs with reasoning and answer, stable ids, held-out split, planted truth."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfkv.errors import CfkvError
from cfkv.problems.registers import (
    FILLER_WORDS,
    VOCABULARY,
    Line,
    Program,
    Registers,
    draw_program,
    filler_phrase,
    held_out_program,
    is_held_out,
    planted_truth,
    training_program,
)


def interpret(question: str) -> tuple[dict[str, int], dict[str, int]]:
    """Run a prompt, sharing no code with the package: the value after every line and in every slot."""
    words = question.split()
    body = words[words.index("<bos>") + 1 : words.index("ask")]
    values: dict[str, int] = {}
    slots: dict[str, int] = {}
    name, tag, value = "", None, 0
    for word in body:
        if word[0] == "%":
            name, tag = word, None
        elif word[0] == "R":
            tag = word
        else:
            value = int(word[1:]) if word[0] == "=" else (value + int(word)) % 10
            values[name] = value
            if tag:
                slots[tag] = value
    return values, slots


def test_hand_computed_program() -> None:
    program = Program(
        (
            Line("%y", "=8", None),  # 8
            Line("%z", "+3", None),  # 8 + 3 = 11 -> 1
            Line("%a", "-2", 2),  # 1 - 2 = -1 -> 9
            Line("%b", "+1", 1),  # 9 + 1 = 10 -> 0
            Line("%c", "=4", None),  # 4
        )
    )
    assert program.values() == [8, 1, 9, 0, 4]
    assert " ".join(program.prompt_words()) == "<bos> %y =8 %z +3 %a R2 -2 %b R1 +1 %c =4 ask 2 <think>"
    y, z, c = (" ".join(filler_phrase(name)) for name in ("%y", "%z", "%c"))
    assert " ".join(program.reasoning_words()) == (
        f"%y =8 8 ; {y} %z +3 1 ; {z} %a R2 -2 9 R2=9 ; %b R1 +1 0 R1=0 ; %c =4 4 ; {c}"
    )
    assert program.answer_words() == ["R1=0", "R2=9"]


def test_vocabulary() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 177
    assert set(FILLER_WORDS) < set(VOCABULARY)
    phrases = [filler_phrase(f"%{letter}") for letter in "abcdefghijklmnopqrstuvwxyz"]
    assert {len(phrase) for phrase in phrases} == {14, 15, 16}
    assert {word for phrase in phrases for word in phrase} == set(FILLER_WORDS)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), index=st.integers(0, 10**6))
def test_held_out_problems_follow_the_rules(seed: int, index: int) -> None:
    program = held_out_program(seed, index)
    lines = program.lines
    assert 10 <= len(lines) <= 16
    assert sorted(line.slot for line in lines if line.slot) == [1, 2, 3, 4]
    letters = [ord(line.name[1:]) - ord("a") for line in lines]
    assert [(letters[0] + step) % 26 for step in range(len(lines))] == letters
    restart = 0
    for at, line in enumerate(lines):
        if line.operation[0] == "=":
            restart = at
        assert line.slot is None or at - restart >= 2
    assert lines[0].operation[0] == "="

    values, slots = interpret(" ".join(program.prompt_words()))
    assert program.values() == list(values.values())
    assert program.answer_words() == [f"R{slot}={slots[f'R{slot}']}" for slot in (1, 2, 3, 4)]
    reasoning = program.reasoning_words()
    assert set(reasoning) <= set(VOCABULARY)
    stated = [int(word) for word in reasoning if word.isdigit()]
    assert stated == program.values()

    truth = planted_truth(reasoning)
    assert truth.fused.sum() == 4
    assert truth.cache.sum() == 8
    assert truth.occlusion.sum() == 12
    assert truth.fact.sum() == 24
    assert not (truth.fact & truth.filler).any()


def test_ids_do_not_depend_on_how_many_are_drawn() -> None:
    ten = list(islice(Registers().load(None, seed=3), 10))
    assert list(islice(Registers().load(None, seed=3), 4)) == ten[:4]
    assert ten[7].problem_id == "registers-00007"
    assert ten[7].question == " ".join(held_out_program(3, 7).prompt_words())
    other = list(islice(Registers().load(None, seed=4), 10))
    assert not {problem.question for problem in ten} & {problem.question for problem in other}


def test_training_and_held_out_are_disjoint() -> None:
    generator = random.Random(0)
    held_out = {" ".join(held_out_program(0, index).prompt_words()) for index in range(1500)}
    training = [training_program(generator, generator.randint(10, 16)) for _ in range(2000)]
    assert len(held_out) == 1500
    assert not held_out & {" ".join(program.prompt_words()) for program in training}
    assert not any(is_held_out(program) for program in training)


def test_planted_truth_of_hand_written_lines() -> None:
    text = "%m =6 6 ; now we go on %o R3 -2 4 R3=4 ; %p R1 +1 5 R1=5 ; </think>"
    truth = planted_truth(text.split())
    # 0 %m 1 =6 2 6 3 ; | 4-7 filler | 8 %o 9 R3 10 -2 11 4 12 R3=4 13 ; | 14 %p 15 R1 16 +1 17 5 18 R1=5 19 ;
    assert np.flatnonzero(truth.fused).tolist() == [12, 18]
    assert np.flatnonzero(truth.cache).tolist() == [11, 12, 17, 18]
    assert np.flatnonzero(truth.occlusion).tolist() == [9, 11, 12, 15, 17, 18]
    assert np.flatnonzero(truth.fact).tolist() == list(range(8, 20))
    assert np.flatnonzero(truth.filler).tolist() == [4, 5, 6, 7]


def test_planted_truth_of_text_without_facts() -> None:
    for text in ("", "now we go on", "R1=3 ; %a R2 +1 4 R1=4 ;"):
        truth = planted_truth(text.split())
        assert not truth.occlusion.any()
        assert not truth.fact.any()
        assert truth.filler.shape == (len(text.split()),)


def test_errors_name_the_value() -> None:
    with pytest.raises(CfkvError, match="6 lines with 4 slots"):
        draw_program(random.Random(0), 6, 4)
    with pytest.raises(CfkvError, match="words.txt"):
        next(Registers().load(Path("words.txt"), seed=0))
