"""Tokens: escaping, shading, what is refused."""

from __future__ import annotations

import re

import pytest
from report_frames import PROMPT_LEN, REASONING_STOP, TOKENS, label, tables, trace

from cfkv.errors import CfkvError
from cfkv.report.tokens import choose_traces, tokens_html, visible


def spans(html: str) -> list[tuple[str, str, str]]:
    """(class, style, title) of each token, without the legend."""
    body = html.partition('<div class="tokens">')[2]
    return re.findall(r'<span class="t (\w+)"(?: style="([^"]*)")? title="([^"]*)">', body)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>", "&lt;script&gt;"),
        ("\"&'", "&quot;&amp;&#x27;"),
        ("\n", '<i class="ws">⏎</i>'),
        ("  ", '<i class="ws">␣␣</i>'),
        (" a", " a"),
        ("\t", '<i class="ws">⇥</i>'),
        ("", '<i class="ws">∅</i>'),
        ("\ufffd", "\ufffd"),
        ("\x00", '<i class="ws">U+0000</i>'),
        ("\u202e", '<i class="ws">U+202E</i>'),
        ("\ud800", '<i class="ws">U+D800</i>'),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_every_token_is_there_with_its_region() -> None:
    found = spans(tokens_html(trace(1), label(1, (4, 5))))
    assert len(found) == len(TOKENS)
    names = [name for name, _, _ in found]
    assert names[:PROMPT_LEN] == ["prompt"] * PROMPT_LEN
    assert [i for i, name in enumerate(names) if name == "imp"] == [4, 5]
    assert [i for i, name in enumerate(names) if name == "not"] == [2, 3, 6, 7, 8, 9]
    assert names[REASONING_STOP:] == ["untested"] * (len(TOKENS) - REASONING_STOP)
    assert found[4][2] == "position 4 · id 104 · importance 1 · value 0.250 nats/token"
    assert found[2][2] == "position 2 · id 102 · importance 0 · value −0.250 nats/token"
    assert found[0][2] == "position 0 · id 100 · prompt"


def test_opacity_follows_value() -> None:
    found = spans(tokens_html(trace(1), label(1, (4, 5))))
    opacity = [float(style.removeprefix("--a:")) for _, style, _ in found if style]
    assert opacity[:2] == [0.12, 0.12], "negative and zero values are faint"
    assert opacity == sorted(opacity)
    assert opacity[-1] == 1


@pytest.mark.parametrize("row", [None, label(1, (), importance=None, value=None, status="failed")])
def test_without_labels_nothing_is_shaded(row: dict | None) -> None:
    names = [name for name, _, _ in spans(tokens_html(trace(1), row))]
    assert set(names) == {"prompt", "untested"}


def test_lists_of_another_length_are_refused() -> None:
    with pytest.raises(CfkvError, match="importance of trace 't1' has 1 entries for 14 tokens"):
        tokens_html(trace(1), label(1, (), importance=[0]))
    with pytest.raises(CfkvError, match="14 token ids and 1 token texts"):
        tokens_html(trace(1, token_texts=["a"]), None)


def test_long_traces_are_cut_and_say_so() -> None:
    html = tokens_html(trace(1), label(1, ()), max_tokens=5)
    assert len(spans(html)) == 5
    assert "Cut after 5 of 14 tokens." in html


def test_choice_prefers_labelled_traces_with_a_mix() -> None:
    rows = tables()
    chosen = choose_traces(rows["traces"], rows["token_labels"], "occlusion", 7)
    assert chosen == ["t1", "t2", "t3", "t4", "t5", "t6", "t7"]
    reverse = rows["traces"].reverse()
    assert choose_traces(reverse, rows["token_labels"], "occlusion", 3) == ["t4", "t3", "t2"]
