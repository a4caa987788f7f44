"""Registers: generated programs whose load-bearing reasoning tokens are known by construction.

A prompt lists 10 to 16 lines in a word-level language. Lines have consecutive letters as names (cyclic, from
a random start); `=d` restarts a chain at d, `+k` and `-k` (k = 1, 2, 3) go on from the line before, modulo
10. Four lines carry a slot tag R1..R4, each at least two operations after a restart:

    <bos> %m =6 %n +2 %o R3 -2 %p R2 -2 ... ask 4 <think>

The reasoning states every line again with its value. A tagged line ends in a fused fact such as `R3=6`; an
untagged line is computation that the answer does not need, and a filler phrase follows it that depends on
nothing but the line's letter, so that the reasoning is a function of the prompt:

    %m =6 6 ; now we go on ... %n +2 8 ; ... %o R3 -2 6 R3=6 ; %p R2 -2 4 R2=4 ; ... </think>

The answer is `\\boxed{ R1=3 R2=4 R3=6 R4=1 } <eos>`. Tagged lines stand in one or two groups of neighbours,
so that windows of a few tokens separate load-bearing text from filler.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cfkv.errors import CfkvError
from cfkv.problems._base import Problem, ProblemSource, problem_sources

PAD, UNKNOWN, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
THINK, END_THINK = "<think>", "</think>"
BOX_OPEN, BOX_CLOSE = "\\boxed{", "}"
ASK, LINE_END = "ask", ";"

NUM_SLOTS = 4
MIN_LINES, MAX_LINES = 10, 16
MAX_STEP = 3
NUM_PROBLEMS = 100_000
"""Held-out problems per seed: as many as five-digit ids can name."""
HELD_OUT_SHARE = 8
"""One prompt in this many belongs to the held-out side; see `is_held_out`."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_OPENINGS = (
    "now we go on",
    "that looks right so far",
    "so keep this in mind",
    "okay now one more step",
    "let me check it all again",
)
_MIDDLES = (
    "before moving on to another",
    "because order matters here again",
    "since nothing else has changed",
    "without any trouble at all",
    "as the list told us",
)
_CLOSINGS = (
    "and then read what follows",
    "and continue it with care",
    "which seems quite simple",
    "though slowly is better too",
    "but do not stop here yet",
)
FILLER_WORDS: tuple[str, ...] = tuple(dict.fromkeys(" ".join(_OPENINGS + _MIDDLES + _CLOSINGS).split()))
"""The 67 words of the filler phrases; none of them carries a value."""

VOCABULARY: tuple[str, ...] = (
    *(PAD, UNKNOWN, BOS, EOS, THINK, END_THINK, BOX_OPEN, BOX_CLOSE, ASK, LINE_END),
    *(f"%{letter}" for letter in _LETTERS),
    *(str(digit) for digit in range(10)),
    *(f"={digit}" for digit in range(10)),
    *(f"{sign}{step}" for sign in "+-" for step in range(1, MAX_STEP + 1)),
    *(f"R{slot}" for slot in range(1, NUM_SLOTS + 1)),
    *(f"R{slot}={value}" for slot in range(1, NUM_SLOTS + 1) for value in "0123456789?"),
    *FILLER_WORDS,
)
"""All 177 words; a word's index is its token id."""

_FUSED = re.compile(r"R([1-9])=([0-9])")


@dataclass(frozen=True)
class Line:
    """One program line: its name (`%m`), its operation (`=6`, `+2`, `-1`) and its slot (1 to 4) or None."""

    name: str
    operation: str
    slot: int | None


@dataclass(frozen=True)
class Program:
    """A whole problem: its lines, and everything that follows from them."""

    lines: tuple[Line, ...]

    def values(self) -> list[int]:
        """The value (0 to 9) after each line."""
        values: list[int] = []
        for line in self.lines:
            number = int(line.operation[1:])
            if line.operation[0] == "=":
                values.append(number)
            else:
                values.append((values[-1] + (number if line.operation[0] == "+" else -number)) % 10)
        return values

    def prompt_words(self) -> list[str]:
        """`<bos>`, every line as name, tag if any, operation; then `ask`, the number of slots, `<think>`."""
        words = [BOS]
        for line in self.lines:
            words += _stated(line)
        return [*words, ASK, str(sum(line.slot is not None for line in self.lines)), THINK]

    def reasoning_words(self) -> list[str]:
        """The text between `<think>` and `</think>`, both excluded."""
        words: list[str] = []
        for line, value in zip(self.lines, self.values(), strict=True):
            words += [*_stated(line), str(value)]
            if line.slot is None:
                words += [LINE_END, *filler_phrase(line.name)]
            else:
                words += [f"R{line.slot}={value}", LINE_END]
        return words

    def answer_words(self) -> list[str]:
        """The words inside the box: one fused fact per slot, in the order of the slots."""
        found = {line.slot: value for line, value in zip(self.lines, self.values(), strict=True) if line.slot}
        return [f"R{slot}={found[slot]}" for slot in sorted(found)]


@dataclass(frozen=True)
class PlantedTruth:
    """What each reasoning token is for; all fields are (N,) booleans, N reasoning tokens.

    occlusion : `Rk`, digit and fused fact of every tagged line: hiding any one of them costs the answer.
    cache : digit and fused fact of every tagged line: the cached entries that the answer reads.
    fused : the fused facts `Rk=d` alone.
    fact : the whole tagged line, from its name to its `;`.
    filler : words of filler phrases. What is neither fact nor filler is computation on untagged lines.

    A window is filler-only in the wide sense if it touches no `fact` token, in the strict sense if all its
    tokens are `filler`.
    """

    occlusion: NDArray[np.bool_]
    cache: NDArray[np.bool_]
    fused: NDArray[np.bool_]
    fact: NDArray[np.bool_]
    filler: NDArray[np.bool_]


def _stated(line: Line) -> list[str]:
    return [line.name, *([] if line.slot is None else [f"R{line.slot}"]), line.operation]


def filler_phrase(name: str) -> list[str]:
    """The 14 to 16 filler words that follow the untagged line called `name` (`%a` to `%z`)."""
    index = _LETTERS.index(name[1:])
    return f"{_OPENINGS[index % 5]} {_MIDDLES[index // 5 % 5]} {_CLOSINGS[2 * index % 5]}".split()


def planted_truth(reasoning_tokens: Sequence[str]) -> PlantedTruth:
    """Mark the load-bearing tokens of a reasoning text.

    Parameters
    ----------
    reasoning_tokens : sequence of str, length N
        The words between `<think>` and `</think>`, as written by a model or by `Program.reasoning_words`.
        A line is tagged if it holds some `Rk=d` after the same `Rk`; lines begin at their names.

    Returns
    -------
    PlantedTruth
        Five (N,) boolean arrays.
    """
    occlusion, cache, fused, fact = (np.zeros(len(reasoning_tokens), dtype=bool) for _ in range(4))
    start = 0
    for index, token in enumerate(reasoning_tokens):
        if token.startswith("%"):
            start = index
        match = _FUSED.fullmatch(token)
        if match is None:
            continue
        tags = [at for at in range(start, index) if reasoning_tokens[at] == f"R{match[1]}"]
        if not tags:
            continue
        digits = [at for at in range(tags[0], index) if reasoning_tokens[at] == match[2]]
        closed = index + 1 < len(reasoning_tokens) and reasoning_tokens[index + 1] == LINE_END
        fact[start : index + 1 + closed] = True
        fused[index] = True
        cache[[*digits, index]] = True
        occlusion[[*tags, *digits, index]] = True
    words = frozenset(FILLER_WORDS)
    filler = np.array([token in words for token in reasoning_tokens], dtype=bool)
    return PlantedTruth(occlusion, cache, fused, fact, filler)


def _tagged_positions(generator: random.Random, num_lines: int, num_slots: int) -> set[int]:
    """Where the tagged lines stand: one or two groups, two lines or more before, one or more after."""
    trailing = 2 if num_lines >= num_slots + 4 else 1
    spare = num_lines - num_slots - 2 - trailing
    sizes = [num_slots]
    if num_slots > 1 and spare > 0 and generator.random() < 0.25:
        first = generator.randint(1, num_slots - 1)
        sizes = [first, num_slots - first]
        spare -= 1
    gaps = [2, *(1 for _ in sizes[1:]), trailing]
    for _ in range(spare):
        gaps[generator.randrange(len(gaps))] += 1
    positions: set[int] = set()
    at = 0
    for gap, size in zip(gaps, sizes, strict=False):
        positions.update(range(at + gap, at + gap + size))
        at += gap + size
    return positions


def draw_program(generator: random.Random, num_lines: int, num_slots: int = NUM_SLOTS) -> Program:
    """Draw a program of `num_lines` lines, `num_slots` of them tagged.

    Raises
    ------
    CfkvError
        If the lines do not fit: legal are 1 to 4 slots and num_slots + 3 to 26 lines.
    """
    if not 1 <= num_slots <= NUM_SLOTS or not num_slots + 3 <= num_lines <= len(_LETTERS):
        raise CfkvError(
            f"cannot draw a program of {num_lines} lines with {num_slots} slots: legal are 1 to {NUM_SLOTS} "
            f"slots and (slots + 3) to {len(_LETTERS)} lines"
        )
    tagged = _tagged_positions(generator, num_lines, num_slots)
    slots = list(range(1, num_slots + 1))
    generator.shuffle(slots)
    first_letter = generator.randrange(len(_LETTERS))
    lines = []
    for index in range(num_lines):
        name = f"%{_LETTERS[(first_letter + index) % len(_LETTERS)]}"
        may_restart = index not in tagged and index + 1 not in tagged
        if index == 0 or (may_restart and generator.random() < 0.25):
            operation = f"={generator.randrange(10)}"
        else:
            operation = f"{generator.choice('+-')}{generator.randint(1, MAX_STEP)}"
        lines.append(Line(name, operation, slots.pop() if index in tagged else None))
    return Program(tuple(lines))


def is_held_out(program: Program) -> bool:
    """Whether the prompt is on the held-out side: a checksum of its text decides, whatever seed drew it."""
    return zlib.crc32(" ".join(program.prompt_words()).encode()) % HELD_OUT_SHARE == 0


def held_out_program(seed: int, index: int) -> Program:
    """Held-out program `index` of `seed`, the same however many are drawn."""
    generator = random.Random(f"registers/held-out/{seed}/{index}")
    while True:
        program = draw_program(generator, generator.randint(MIN_LINES, MAX_LINES))
        if is_held_out(program):
            return program


def training_program(generator: random.Random, num_lines: int, num_slots: int = NUM_SLOTS) -> Program:
    """A program for training: never one that `held_out_program` can return."""
    while True:
        program = draw_program(generator, num_lines, num_slots)
        if not is_held_out(program):
            return program


@problem_sources.register
class Registers(ProblemSource):
    """A long stream of held-out programs; the built-in model learned on the other side of the split."""

    source = "generated by cfkv.problems.registers"
    licence = "Apache-2.0"
    answer_format = "the fused facts inside the box in the order of the slots: R1=d R2=d R3=d R4=d"

    def load(self, path: Path | None, *, seed: int) -> Iterator[Problem]:
        """Yield problems `registers-00000` to `registers-99999`; no file is read.

        `question` is the whole prompt from `<bos>` to `<think>`, `solution` the text between `<think>` and
        `</think>`, `answer` the text inside the box; all are words joined by single spaces.
        """
        if path is not None:
            raise CfkvError(f"registers problems are generated, but a file was given ({path}); leave it out")
        for index in range(NUM_PROBLEMS):
            program = held_out_program(seed, index)
            yield Problem(
                problem_id=f"registers-{index:05d}",
                question=" ".join(program.prompt_words()),
                answer=" ".join(program.answer_words()),
                solution=" ".join(program.reasoning_words()),
            )
