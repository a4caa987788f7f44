"""What is known of a token without the model: its place and the class of its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cfkv.models.tokens import decode

CLASSES = ("digit", "operator", "word", "whitespace", "delimiter")
OPERATORS = frozenset("+-*/=<>^%±×÷·−≤≥≠≈√∑∏∫→⇒∞∈∪∩")
MARKER = re.compile(r"<\|.*\|>|</?\w+>|\[/?[A-Z]+\]")  # <think>, <|im_end|>, [INST]
COMMAND = re.compile(r"\\[A-Za-z]+")


@dataclass(frozen=True)
class TokenFacts:
    """ids, classes : [C]; a class is an index into CLASSES, or -1 for none of them.

    reasoning : start and stop of the reasoning, as indices into the trace.
    """

    ids: Tensor
    classes: Tensor
    reasoning: tuple[int, int]


def token_class(text: str) -> int:
    r"""Index into CLASSES of a token's text alone, -1 for none (part of a character).

    A LaTeX command counts as an operator (`\frac`, `\sqrt`), but for `\boxed`; a marker such as `</think>` as a
    delimiter. Otherwise the first rule that fits: a letter makes a word, a digit a digit, then operators, then
    other punctuation.
    """
    bare = text.strip()
    if not bare:
        return CLASSES.index("whitespace") if text else -1
    if MARKER.fullmatch(bare):
        return CLASSES.index("delimiter")
    if COMMAND.match(bare):
        return CLASSES.index("delimiter" if bare.startswith("\\boxed") else "operator")
    if "�" in bare:
        return -1
    rules = (("word", str.isalpha), ("digit", str.isdigit), ("operator", OPERATORS.__contains__))
    for name, rule in rules:
        if any(rule(character) for character in bare):
            return CLASSES.index(name)
    return CLASSES.index("delimiter")


def token_classes(tokenizer: Any, ids: Sequence[int]) -> Tensor:
    """int8 [tokens]: the class of each id, from its own text and never from its neighbours'."""
    known = {token: token_class(decode(tokenizer, [token])) for token in set(ids)}
    return torch.tensor([known[token] for token in ids], dtype=torch.int8)
