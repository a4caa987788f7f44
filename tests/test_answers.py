r"""Boxed answers: found, spelled canonically, compared as text and as mathematics."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfkv import math_match
from cfkv.answers import boxed_answer, exact_match, first_box, matcher, normalise
from cfkv.errors import CfkvError
from cfkv.math_match import MathMatcher

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs the extra: pip install 'cfkv[math]'"
)
# Text in which boxes, escapes and the things that normalise removes are likely.
pieces = st.sampled_from(
    [
        r"\boxed{",
        "{",
        "}",
        r"\{",
        r"\}",
        "\\",
        r"\text{",
        r"\mathrm{",
        "$",
        ".",
        ",",
        "-",
        "+",
        " ",
        r"\!",
        r"\,",
    ]
    + ["0", "1", "20", "300", "000", "x", "\n", "Ω"]
)
texts = st.lists(pieces, max_size=14).map("".join)


def brute_force_box(text: str) -> tuple[str, int] | None:
    """The definition, slowly: the leftmost opening for which some end balances; the first such end."""
    for start in range(len(text)):
        inner = start + len(r"\boxed{")
        if text[start:inner] != r"\boxed{":
            continue
        for end in range(inner, len(text)):
            bare, skip = [], False
            for character in text[inner : end + 1]:
                if not skip:
                    bare.append(character)
                skip = character == "\\" and not skip
            if not skip and bare.count("}") == bare.count("{") + 1 and bare[-1] == "}" and text[end] == "}":
                return text[inner:end], end + 1
    return None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}.", ("42", 13)),  # 3 + 7 + 2 + 1
        (r"\boxed{\frac{1}{2}} then", (r"\frac{1}{2}", 19)),
        (r"\boxed{a{b{c}d}e}", ("a{b{c}d}e", 17)),
        (r"\boxed{\{1, 2\}}", (r"\{1, 2\}", 16)),
        (r"\boxed{\}}", (r"\}", 10)),
        (r"\boxed{a\\}", (r"a\\", 11)),  # an escaped backslash does not escape the brace
        (r"\boxed{}", ("", 8)),
        (r"\boxed{1}\boxed{2}", ("1", 9)),
        (r"\boxed{never closed", None),
        (r"\boxed{never {closed}", None),
        (r"\boxed{a \boxed{7}", ("7", 18)),  # the outer one never closes
        (r"\boxed{a \boxed{7}}", (r"a \boxed{7}", 19)),
        (r"\boxed{ends in \ ".strip(), None),
        (r"boxed{3} and \boxed 4", None),
        ("", None),
    ],
)
def test_first_box_by_hand(text: str, found: tuple[str, int] | None) -> None:
    assert first_box(text) == found


@settings(deadline=None, max_examples=300)
@given(texts)
def test_first_box_is_what_brute_force_finds(text: str) -> None:
    assert first_box(text) == brute_force_box(text)


@settings(deadline=None)
@given(texts, texts)
def test_a_complete_box_is_settled(text: str, more: str) -> None:
    """Text that comes later changes nothing: decoding may stop at the closing brace."""
    found = first_box(text)
    if found is not None:
        assert first_box(text[: found[1]]) == found
        if text.find(r"\boxed{") == found[1] - 1 - len(found[0]) - len(r"\boxed{"):
            assert first_box(text[: found[1]] + more) == found


def test_boxed_answer_strips_and_joins_white_space() -> None:
    assert boxed_answer("\\boxed{ R1=3\n R2=4 }") == "R1=3 R2=4"
    assert boxed_answer(r"\boxed{ }") == ""
    assert boxed_answer("18") is None


@pytest.mark.parametrize(
    ("answer", "canonical"),
    [
        ("18", "18"),
        (" $18$ . ", "18"),
        (r"\$1,200.00", "1200"),
        ("1,234,567", "1234567"),
        ("12,34", "12,34"),  # no thousands comma
        ("(1,234)", "(1,234)"),  # not a plain number: perhaps a pair
        ("1,2,3", "1,2,3"),
        (r"10{,}000", "10{,}000"),
        (r"10\!000", "10000"),
        (r"10\,000", "10000"),
        ("007", "7"),
        ("000", "0"),
        ("-0", "0"),
        ("-0.00", "0"),
        ("+5", "5"),
        ("-3.50", "-3.5"),
        (".5", "0.5"),
        ("-.50", "-0.5"),
        ("5.", "5"),
        ("1.2.3", "1.2.3"),
        (r"\text{blue}", "blue"),
        (r"\text{\text{blue}}", "blue"),
        (r"5\text{ cm}", "5cm"),
        (r"\mathrm{kg}", "kg"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("3 \\;\n+ x", "3+x"),
        ("yes..", "yes"),
        ("R1=3 R2=4", "R1=3R2=4"),
        ("", ""),
        (".", ""),
        ("-", "-"),
        ("50%", "50%"),
    ],
)
def test_normalise_by_hand(answer: str, canonical: str) -> None:
    assert normalise(answer) == canonical


@settings(deadline=None, max_examples=300)
@given(texts | st.text(max_size=12))
def test_normalise_is_idempotent(answer: str) -> None:
    once = normalise(answer)
    assert normalise(once) == once
    assert not set(once) & set(" \n$")


@settings(deadline=None)
@given(st.integers())
def test_integers_equal_themselves_however_written(number: int) -> None:
    plain = str(number)
    for spelt in (f"{number:,}", f"${number:,}$", f"{number:,}.00", f" {number}. ", f"\\text{{{number}}}"):
        assert normalise(spelt) == plain
        assert exact_match(spelt, plain)
    assert not exact_match(str(number + 1), plain)


@settings(deadline=None)
@given(st.decimals(-(10**6), 10**6, places=4), st.decimals(-(10**6), 10**6, places=4))
def test_decimals_match_when_their_values_do(first: Any, second: Any) -> None:
    assert exact_match(f"{first:,}", f"{second:f}") == (first == second)
    assert exact_match(f"{first:,}", f"{first:f}000")


def test_exact_match_needs_both() -> None:
    assert exact_match("", "")
    assert not exact_match(None, "1")
    assert not exact_match("1", None)
    assert not exact_match(None, None)
    assert matcher("exact") is exact_match


def test_math_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_match.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CfkvError) as caught:
        matcher("math")
    assert str(caught.value) == (
        "answer_match 'math' needs math-verify, which is not installed; `pip install 'cfkv[math]'`, or use "
        "--answer-match exact"
    )


def _hangs_on_a_question(pipe: Connection) -> None:
    """A worker that is ready and then never answers."""
    pipe.send(None)
    pipe.recv()
    threading.Event().wait()


def _dies_on_a_question(pipe: Connection) -> None:
    pipe.send(None)
    pipe.recv()


def _dies_at_once(pipe: Connection) -> None:
    pipe.close()


@pytest.fixture(scope="module")
def math() -> Iterator[MathMatcher]:
    """One worker for all comparisons: starting it costs seconds."""
    if importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs the extra: pip install 'cfkv[math]'")
    made = MathMatcher(timeout=60)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{2}{4}", "1/2", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("1/3", "0.5", False),
        ("3", "4", False),
        ("no number", "5", False),
        (r"\frac{", "5", False),
        (None, "5", False),
        ("5", None, False),
    ],
)
def test_mathematical_equality(math: MathMatcher, answer: Any, reference: Any, *, same: bool) -> None:
    assert math(answer, reference) is same
    assert math.timeouts == 0


@needs_math_verify
@pytest.mark.parametrize("worker", [_hangs_on_a_question, _dies_on_a_question])
def test_a_worker_that_does_not_answer_is_replaced(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, taken for different, ended; the next comparison gets a new worker."""
    stuck = MathMatcher(timeout=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(math_match, "_serve", worker)
        stuck._start()
        process = stuck._process
        assert process is not None
        assert stuck("1/2", "0.5") is False
    assert stuck.timeouts == 1
    assert not process.is_alive()
    stuck.timeout = 60
    assert stuck("1/2", "0.5") is True
    assert stuck.timeouts == 1
    stuck.close()


@needs_math_verify
def test_equal_texts_need_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a worker that cannot start is an error, not a wrong answer."""
    monkeypatch.setattr(math_match, "_serve", _dies_at_once)
    made = MathMatcher()
    assert made("1,000", "1000.0") is True
    with pytest.raises(
        CfkvError, match="worker of math-verify ended while starting; try again, or use --answer-match"
    ):
        made("1", "2")
