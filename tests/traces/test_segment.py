"""Boundary rules on hand-made sequences, and against a character-by-character reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cfkv.answers import first_box
from cfkv.errors import ItemError
from cfkv.models.loading import LoadedModel
from cfkv.models.tokens import decode, encode
from cfkv.traces.segment import TAIL_TOKENS, Spans, answer_length, segment

# Tokens of the byte tokenizer; several of them together spell a marker.
SPELT = ("<", "/t", "h", "ink", ">")
ODD = ("x<", "/", "t", "h", "in", "k", ">")
OPENED = ("\\b", "o", "x", "ed", "{")
OPENED_ODD = ("\\", "b", "o", "x", "e", "d", "{")


def ids_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    assert None not in ids
    return ids


def split(tokenizer: PreTrainedTokenizerFast, prompt: Sequence[str], output: Sequence[str]) -> Spans:
    return segment(tokenizer, ids_of(tokenizer, [*prompt, *output]), len(prompt))


def spans(start: int, stop: int, answer: int, end: int, boundary: str) -> Spans:
    return Spans(
        reasoning_start=start, reasoning_stop=stop, answer_start=answer, answer_stop=end, boundary=boundary
    )


PROMPT = ("q", "?", *SPELT)  # a marker in the prompt does not count


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        # the last </think>, and the answer up to the closing brace
        (("a", "b", *SPELT, *OPENED, "7", "}", "c"), spans(7, 9, 14, 21, "think_end")),
        (("a", *SPELT, "b", *SPELT, "c"), spans(7, 14, 19, 20, "think_end")),
        # a box in the reasoning is not the answer
        (("a", *OPENED, "1", "}", *SPELT, *OPENED, "7", "}"), spans(7, 15, 20, 27, "think_end")),
        # nothing after the boundary
        (("a", *SPELT), spans(7, 8, 13, 13, "think_end")),
        # spelt by other tokens, the first of which also holds reasoning
        (("a", "b", *ODD, "c"), spans(7, 9, 16, 17, "think_end")),
        # the usual spelling first, an odd one last: the last one counts
        (("a", *SPELT, "b", *ODD, "c", "d"), spans(7, 14, 21, 23, "think_end")),
        (("a", *ODD, "b", *SPELT, "c", "d"), spans(7, 16, 21, 23, "think_end")),
        # no </think>: the last box
        (("a", *OPENED, "1", "}", "b", *OPENED, "2", "}"), spans(7, 16, 16, 23, "boxed")),
        (("a", "b", *OPENED_ODD, "2", "}", "c"), spans(7, 9, 9, 18, "boxed")),
        # a last box that stays open: all of the rest is answer
        (("a", *OPENED, "1", "}", "b", *OPENED, "2"), spans(7, 16, 16, 22, "boxed")),
        # the closing brace inside a longer token
        (("a", *SPELT, *OPENED, "7", "}.", "c"), spans(7, 8, 13, 20, "think_end")),
        # an unfinished </think is none
        (("a", *SPELT[:-1], *OPENED, "7", "}"), spans(7, 12, 12, 19, "boxed")),
    ],
)
def test_boundary_rules(
    byte_tokenizer: PreTrainedTokenizerFast, output: tuple[str, ...], expected: Spans
) -> None:
    assert split(byte_tokenizer, PROMPT, output) == expected


def test_tail(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    output = ("a",) * (TAIL_TOKENS + 5)
    assert split(byte_tokenizer, PROMPT, output) == spans(7, 12, 12, 76, "tail")
    for short in (1, TAIL_TOKENS):
        with pytest.raises(ItemError, match="no_reasoning.*'tail'"):
            split(byte_tokenizer, PROMPT, ("a",) * short)


@pytest.mark.parametrize(
    ("output", "rule"), [((*OPENED, "7", "}"), "boxed"), ((*SPELT, "a"), "think_end"), ((*ODD,), "think_end")]
)
def test_no_reasoning(byte_tokenizer: PreTrainedTokenizerFast, output: tuple[str, ...], rule: str) -> None:
    with pytest.raises(ItemError, match=rule) as caught:
        split(byte_tokenizer, PROMPT, output)
    assert caught.value.status == "no_reasoning"


def test_empty_response(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ItemError) as caught:
        split(byte_tokenizer, PROMPT, ())
    assert caught.value.status == "empty_response"


def test_marker_of_one_token(word_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = word_tokenizer("w1 <think> w2 w3 </think> w4 \\boxed{ 3 } w5")["input_ids"]
    assert segment(word_tokenizer, ids, 2) == spans(2, 4, 5, 9, "think_end")


def test_multibyte_text_around_the_marker(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(byte_tokenizer, "漢字</think>é\\boxed{漢}é")
    assert segment(byte_tokenizer, ids, 0) == spans(0, 6, 11, 22, "think_end")


def reference(texts: list[str]) -> tuple[str, int, int, int]:
    """Boundary, reasoning_stop, answer_start, answer_stop of an output, found by characters."""
    owner = [place for place, text in enumerate(texts) for _ in text]
    whole = "".join(texts)
    end, box = whole.rfind("</think>"), whole.rfind("\\boxed{")
    if end >= 0:
        boundary, stop, answer = "think_end", owner[end], owner[end + len("</think>") - 1] + 1
    elif box >= 0:
        boundary, stop, answer = "boxed", owner[box], owner[box]
    else:
        boundary, stop, answer = "tail", len(texts) - TAIL_TOKENS, len(texts) - TAIL_TOKENS
    closing = len(texts)
    for last in range(len(texts), answer, -1):
        if first_box("".join(texts[answer:last])) is not None:
            closing = last
    return boundary, stop, answer, closing


FRAGMENTS = st.sampled_from(
    [SPELT, ODD, OPENED, OPENED_ODD, ("}",), ("}.",), ("a",), ("7",), ("x<",), ("/t",)]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(FRAGMENTS, max_size=9), tail=st.sampled_from([0, 70]))
def test_segment_is_the_search_by_characters(
    byte_tokenizer: PreTrainedTokenizerFast, parts: list[tuple[str, ...]], tail: int
) -> None:
    output = [token for part in [*parts, ("b",) * tail] for token in part]
    if not output:
        return
    boundary, stop, answer, closing = reference(output)
    if stop <= 0:
        with pytest.raises(ItemError, match="no_reasoning"):
            split(byte_tokenizer, PROMPT, output)
    else:
        found = split(byte_tokenizer, PROMPT, output)
        assert found == spans(7, 7 + stop, 7 + answer, 7 + closing, boundary)


@pytest.mark.parametrize(
    ("text", "prefix", "length"),
    [
        ("\\boxed{ 3 } w1", "", 3),
        ("w1 \\boxed{ 3 w2 } w1 }", "", 5),
        ("3 } w1 }", "The final answer is \\boxed{", 2),
        ("} w1", "\\boxed{ 3", 1),
        ("3 } w1 }", "", 4),
        ("\\boxed{ \\boxed{ 3 } } w1", "", 4),  # the inner one is complete first
        ("w1 w2", "", 2),
    ],
)
def test_answer_length(word_tokenizer: PreTrainedTokenizerFast, text: str, prefix: str, length: int) -> None:
    assert answer_length(word_tokenizer, encode(word_tokenizer, text), prefix) == length


def test_smollm2_spells_the_marker_in_several_ways(smollm2: LoadedModel) -> None:
    """Its vocabulary has no </think>; what surrounds the marker decides how it is spelt."""
    tokenizer = smollm2.tokenizer
    spellings = set()
    for before in ("so 4", "so 4.", "so 4\n", "so 4 ", "so 4\n\n", "(", "so <"):
        text = f"first</think>{before}</think>\n\\boxed{{4}} and"
        ids = encode(tokenizer, text)
        found = segment(tokenizer, ids, 0)
        assert found.boundary == "think_end"
        marker = decode(tokenizer, ids[found.reasoning_stop : found.answer_start])
        assert "</think>" in marker
        assert marker.endswith(("</think>", "</think>\n"))
        assert f"first</think>{before}".startswith(decode(tokenizer, ids[: found.reasoning_stop]))
        answer = decode(tokenizer, ids[found.answer_start : found.answer_stop])
        assert first_box(answer) == ("4", len(answer))
        spellings.add(tuple(ids[found.reasoning_stop : found.answer_start]))
    assert len(spellings) > 1
    print(f"smollm2 spells </think> in {len(spellings)} ways here")


class Pieces:
    """A tokenizer whose tokens are given pieces; it spells `</think>` with a token of its own."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = [*pieces, "</think>"]

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [self.pieces.index(text)]}

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(self.pieces[i] for i in ids)


def test_a_token_that_ends_the_boundary_and_opens_the_box() -> None:
    r"""`>\` holds the last character of `</think>` and the first of `\boxed{4}`: the rest is answer prefix."""
    tokenizer = Pieces("question", "2+2", "</think", ">\\", "boxed{", "4", "}", " bye")
    spans = segment(tokenizer, [0, 1, 2, 3, 4, 5, 6, 7], 1)
    assert (spans.reasoning_start, spans.reasoning_stop, spans.answer_start, spans.answer_stop) == (
        1,
        2,
        4,
        7,
    )
    assert (spans.boundary, spans.answer_prefix) == ("think_end", "\\")


@pytest.mark.parametrize(
    ("rule", "output", "expected"),
    [
        ("think_end", ("a", *SPELT, *OPENED, "7", "}"), spans(7, 8, 13, 20, "think_end")),
        # the box, although a </think> comes before it
        ("boxed", ("a", *SPELT, *OPENED, "7", "}"), spans(7, 13, 13, 20, "boxed")),
        # 70 tokens, 64 of them the tail
        ("tail", ("a",) * 70, spans(7, 13, 13, 77, "tail")),
    ],
)
def test_one_rule_for_all_traces(
    byte_tokenizer: PreTrainedTokenizerFast, rule: str, output: tuple[str, ...], expected: Spans
) -> None:
    """A named rule is used even where an earlier one would apply."""
    ids = ids_of(byte_tokenizer, [*PROMPT, *output])
    assert segment(byte_tokenizer, ids, len(PROMPT), rule) == expected


@pytest.mark.parametrize("rule", ["think_end", "boxed"])
def test_a_rule_that_does_not_apply(byte_tokenizer: PreTrainedTokenizerFast, rule: str) -> None:
    """The trace fails with the rule's name; no other rule steps in."""
    ids = ids_of(byte_tokenizer, ["q", "a", "b"])
    with pytest.raises(ItemError, match=f"no_boundary.*{rule}"):
        segment(byte_tokenizer, ids, 1, rule)
