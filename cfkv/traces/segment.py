"""Where reasoning ends and the answer begins (EpiKV's boundary rules, methods 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cfkv.answers import BOX, first_box
from cfkv.errors import ItemError
from cfkv.models.tokens import THINK_END, decode, encode, find_last

TAIL_TOKENS = 64
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Indices into the token ids; `boundary` names the rule that found them.

    `answer_prefix` is answer text before `answer_start`: a token may hold the end of `</think>` and more.
    """

    reasoning_start: int
    reasoning_stop: int
    answer_start: int
    answer_stop: int
    boundary: str
    answer_prefix: str = ""


def segment(tokenizer: Any, token_ids: Sequence[int], prompt_len: int, rule: str = AUTO) -> Spans:
    r"""Split prompt | reasoning | answer.

    The boundary is the last `</think>` (rule think_end); else the start of the last `\boxed{` (boxed); else 64
    tokens before the end (tail). With `</think>` the answer starts after it, so that a regeneration begins in
    answer mode. `rule` auto takes the first that applies, another value holds every trace to that one.

    Raises
    ------
    ItemError
        If the response is empty, the rule does not apply, or it leaves no reasoning.
    """
    output = list(token_ids[prompt_len:])
    if not output:
        raise ItemError("empty_response", "the response has no tokens")
    rules = _RULES.values() if rule == AUTO else [_RULES[rule]]
    found = next((found for each in rules if (found := each(tokenizer, output)) is not None), None)
    if found is None:
        raise ItemError("no_boundary", f"the boundary rule {rule!r} finds nothing in {len(output)} tokens")
    boundary, stop, answer = found
    if stop <= 0:
        raise ItemError(
            "no_reasoning",
            f"the boundary rule {boundary!r} leaves no reasoning before the answer in {len(output)} tokens",
        )
    answer_start = prompt_len + answer
    prefix = (
        decode(tokenizer, output[stop:answer]).rpartition(THINK_END)[2] if boundary == "think_end" else ""
    )
    return Spans(
        reasoning_start=prompt_len,
        reasoning_stop=prompt_len + stop,
        answer_start=answer_start,
        answer_stop=answer_start + answer_length(tokenizer, token_ids[answer_start:], prefix),
        boundary=boundary,
        answer_prefix=prefix,
    )


def _think_end(tokenizer: Any, output: list[int]) -> tuple[str, int, int] | None:
    end = encode(tokenizer, THINK_END)
    start = find_last(output, end)
    if start is not None and THINK_END not in decode(tokenizer, output[start + len(end) :]):
        return "think_end", start, start + len(end)
    # Absent, or followed by one whose characters other tokens spell.
    span = _last_text(tokenizer, output, THINK_END)
    return None if span is None else ("think_end", *span)


def _boxed(tokenizer: Any, output: list[int]) -> tuple[str, int, int] | None:
    span = _last_text(tokenizer, output, BOX)
    return None if span is None else ("boxed", span[0], span[0])


def _tail(tokenizer: Any, output: list[int]) -> tuple[str, int, int] | None:
    return "tail", len(output) - TAIL_TOKENS, len(output) - TAIL_TOKENS


_RULES: Mapping[str, Callable[[Any, list[int]], tuple[str, int, int] | None]] = {
    "think_end": _think_end,
    "boxed": _boxed,
    "tail": _tail,
}


def _last_text(tokenizer: Any, ids: list[int], marker: str) -> tuple[int, int] | None:
    """First and one-past-last token of the last occurrence of `marker`, which tokens may split anywhere."""
    if marker not in decode(tokenizer, ids):
        return None
    # The smallest prefix that holds all occurrences ends with the last one; the longest suffix start that
    # still holds one is where it begins. Both conditions are monotone, so bisection finds them.
    count = decode(tokenizer, ids).count(marker)
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if decode(tokenizer, ids[:middle]).count(marker) >= count:
            high = middle
        else:
            low = middle + 1
    stop = low
    low, high = 0, stop - 1
    while low < high:
        middle = (low + high + 1) // 2
        if marker in decode(tokenizer, ids[middle:stop]):
            low = middle
        else:
            high = middle - 1
    return low, stop


def answer_length(tokenizer: Any, answer_ids: Sequence[int], prefix: str) -> int:
    """Tokens up to the one that closes the first complete box, or all of them.

    `prefix` is the text before the answer that may hold the opening of the box.
    """
    ids = list(answer_ids)
    if first_box(prefix + decode(tokenizer, ids)) is None:
        return len(ids)
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if first_box(prefix + decode(tokenizer, ids[:middle])) is not None:
            high = middle
        else:
            low = middle + 1
    return low
