"""Boxed answers: finding, normalising and comparing them."""

from __future__ import annotations

import re
from typing import Literal, Protocol

BOX = r"\boxed{"
NUMBER = re.compile(r"(?P<sign>[+-]?)(?=\.?\d)(?P<whole>\d*)(?:\.(?P<fraction>\d*))?")


def first_box(text: str) -> tuple[str, int] | None:
    r"""The content of the first complete `\boxed{...}` and the index just after its closing brace.

    Braces inside the box must balance; `\{` and `\}` do not count. A box that never closes is skipped.
    """
    start = text.find(BOX)
    while start >= 0:
        depth, index = 1, start + len(BOX)
        while index < len(text):
            character = text[index]
            if character == "\\":
                index += 2
                continue
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return text[start + len(BOX) : index], index + 1
            index += 1
        start = text.find(BOX, start + len(BOX))
    return None


def boxed_answer(text: str) -> str | None:
    """The stripped content of the first complete box, or None."""
    found = first_box(text)
    return None if found is None else " ".join(found[0].split())


def normalise(answer: str) -> str:
    r"""A canonical spelling for exact comparison.

    White space, dollar signs, thousands commas, `\!`, `\,` and a final period are dropped, `\text{...}` is
    unwrapped, and a plain number is written canonically (`1,200.0` and `1200` are equal).
    """
    text, before = answer, None
    while text != before:  # what one pass removes can uncover more, as in \text{\text{x}}
        before = text
        text = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1", text)
        text = re.sub(r"\\[!,;: ]", "", text).replace("\\$", "").replace("$", "")
        text = "".join(text.split()).removesuffix(".")
    number = NUMBER.fullmatch(re.sub(r",(?=\d{3}(?:\D|$))", "", text))
    if number is None:
        return text
    whole = number["whole"].lstrip("0") or "0"
    fraction = (number["fraction"] or "").rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if number["sign"] == "-" and value != "0" else value


class Matcher(Protocol):
    """Decides whether two answers are the same."""

    def __call__(self, answer: str | None, reference: str | None) -> bool:
        """True if both are present and equal."""


def exact_match(answer: str | None, reference: str | None) -> bool:
    """Equality of the normalised spellings; None equals nothing."""
    return answer is not None and reference is not None and normalise(answer) == normalise(reference)


def matcher(name: Literal["exact", "math"]) -> Matcher:
    """The comparison called `name`; `math` needs the extra of that name."""
    if name == "exact":
        return exact_match
    from cfkv.math_match import MathMatcher

    return MathMatcher()
