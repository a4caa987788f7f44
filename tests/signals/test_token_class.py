"""Classes of tokens by their own text."""

from __future__ import annotations

import pytest

from cfkv.signals._tokens import CLASSES, token_class


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("digit", ["7", " 12", "3.5", "1,000", "²"]),
        ("operator", ["+", " =", "**", "\\frac", "\\sqrt{", "≤", "->", "$+"]),
        ("word", ["the", " So", "x", "w3", "don't", "é"]),
        ("whitespace", [" ", "\n\n", "\t"]),
        (
            "delimiter",
            [".", ",", " (", "{", "</think>", "<|im_end|>", "[INST]", "\\boxed{", "\\", "$", "```"],
        ),
        (None, ["", "�", " �"]),
    ],
)
def test_classes(name: str | None, texts: list[str]) -> None:
    """Letters before digits before operators before other punctuation."""
    expected = -1 if name is None else CLASSES.index(name)
    assert {text: token_class(text) for text in texts} == dict.fromkeys(texts, expected)
