"""One trace as HTML: its tokens shaded by label."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import polars as pl

from cfkv.errors import CfkvError
from cfkv.report.meanings import Wording, wording
from cfkv.report.text import number

MAX_TOKENS = 4000
_FLOOR = 0.12  # opacity of a tested token without effect
_VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥"}


def visible(text: str) -> str:
    """A token's text as escaped HTML in which white space and control characters can be seen."""
    if not text:
        return '<i class="ws">∅</i>'
    if text.isspace() and "\n" not in text:
        marks = "".join(_VISIBLE.get(letter, "␣") for letter in text)
        return f'<i class="ws">{marks}</i>'
    parts = []
    for letter in text:
        if letter in _VISIBLE:
            parts.append(f'<i class="ws">{_VISIBLE[letter]}</i>')
        elif unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn"):
            parts.append(f'<i class="ws">U+{ord(letter):04X}</i>')
        else:
            parts.append(escape(letter))
    return "".join(parts)


def tokens_html(
    trace: Mapping[str, Any],
    label: Mapping[str, Any] | None,
    *,
    words: Wording | None = None,
    max_tokens: int = MAX_TOKENS,
) -> str:
    """The shaded tokens of one trace, with their legend.

    Parameters
    ----------
    trace, label : mapping
        A row of TRACES and the row of TOKEN_LABELS of the same trace (None, or null lists: nothing tested); for a
        graded kind with high damage as its `importance`.
    words : Wording, optional
        How the label is named; those of window kinds if left out.
    max_tokens : int
        Longer traces are cut, with a sentence that says so.

    Raises
    ------
    CfkvError
        If the lists of the two rows differ in length.
    """
    ids, texts = trace["token_ids"] or [], trace["token_texts"] or []
    importance = _column(trace, label, "importance", -1)
    values = _column(trace, label, "value", math.nan)
    if len(texts) != len(ids):
        raise CfkvError(
            f"trace {trace['trace_id']!r} has {len(ids)} token ids and {len(texts)} token texts; "
            "they must be equally many: write the traces again"
        )
    words = words or wording("", graded=False)
    scale = _scale(importance, values)
    prompt_len = trace["prompt_len"] or 0
    spans = [
        _span(
            i,
            ids[i],
            texts[i] or "",
            "prompt" if i < prompt_len else None,
            importance[i],
            values[i],
            scale,
            words,
        )
        for i in range(min(len(ids), max_tokens))
    ]
    cut = ""
    if len(ids) > max_tokens:
        cut = f'<p class="note">Cut after {max_tokens:,} of {len(ids):,} tokens.</p>'
    return f'{_legend(scale, words)}<div class="tokens">{"".join(spans)}</div>{cut}'


def _column(
    trace: Mapping[str, Any], label: Mapping[str, Any] | None, name: str, empty: float
) -> Sequence[Any]:
    length = len(trace["token_ids"] or [])
    found = label[name] if label is not None else None
    if found is None:
        return [empty] * length
    if len(found) != length:
        raise CfkvError(
            f"token_labels.{name} of trace {trace['trace_id']!r} has {len(found)} entries for {length} "
            "tokens; labels and traces must come from the same run: run `cfkv label` again"
        )
    return found


def _scale(importance: Sequence[int], values: Sequence[float | None]) -> float:
    """The value drawn fully opaque: the 95th percentile of the tested tokens' positive values; 0 if none."""
    positive = sorted(
        value
        for flag, value in zip(importance, values, strict=True)
        if flag >= 0 and value is not None and value > 0
    )
    return positive[math.ceil(0.95 * len(positive)) - 1] if positive else 0.0


def _span(
    position: int,
    token_id: int,
    text: str,
    region: str | None,
    flag: int,
    value: float | None,
    scale: float,
    words: Wording,
) -> str:
    name = region or {1: "imp", 0: "not"}.get(flag, "untested")
    tip = f"position {position} · id {token_id} · "
    style = ""
    if name in ("imp", "not"):
        effect = value if value is not None and value > 0 else 0.0
        opacity = _FLOOR + (1 - _FLOOR) * min(1.0, effect / scale if scale else 0.0)
        style = f' style="--a:{opacity:.2f}"'
        tip += f"{words.noun} {flag} · value {_size(value)} {words.unit}"
    else:
        tip += "prompt" if region else "untested"
    breaks = "<br>" if "\n" in text else ""
    return f'<span class="t {name}"{style} title="{escape(tip)}">{visible(text)}</span>{breaks}'


def _size(value: float | None) -> str:
    """Three decimals, or two significant digits where those would all be 0."""
    if value is None or not 0 < abs(value) < 0.0005:
        return number(value)
    return f"{value:.1e}".replace("-", "−")


def _legend(scale: float, words: Wording) -> str:
    ramp = "".join(f'<span class="t {name}" style="--a:{a}">&nbsp;</span>' for name, a in _RAMP)
    most = f"{_size(scale)} {words.unit} or more" if scale else "no token has a positive value"
    return (
        f'<p class="legend"><span class="t imp" style="--a:.8">{words.positive}</span> {words.because} · '
        f'<span class="t not" style="--a:.6">{words.negative}</span> · '
        f'<span class="t prompt">prompt</span> · <span class="t untested">untested</span> ({words.untested}) · '
        f"opacity {ramp} = value, {words.value}: 0 or less → {most}</p>"
    )


_RAMP = [("imp", 0.12), ("imp", 0.56), ("imp", 1), ("not", 0.12), ("not", 0.56), ("not", 1)]


def choose_traces(traces: pl.DataFrame, token_labels: pl.DataFrame, kind: str, wanted: int) -> list[str]:
    """Ids of the traces to show: in table order, labelled ones with a mix of labels before all others.

    Then come labelled traces without a mix, then excluded or failed ones, then unlabelled ones.
    """
    ranks: dict[str, int] = {}
    for row in token_labels.filter(pl.col("kind") == kind).iter_rows(named=True):
        tested = {flag for flag in row["importance"] or [] if flag >= 0}
        ranks[row["trace_id"]] = (0 if len(tested) > 1 else 1) if row["status"] == "labelled" else 2
    rows = traces.filter(pl.col("token_ids").list.len() > 0)["trace_id"].to_list()
    return sorted(rows, key=lambda trace_id: ranks.get(trace_id, 3))[:wanted]
