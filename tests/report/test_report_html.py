"""report.html: well formed, closed in itself, and its numbers those of the tables."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import polars as pl
import pytest
from report_frames import correlation, correlations, empty_tables, frame, label, manifest, tables, window

from cfkv import schemas
from cfkv.config import ReportConfig
from cfkv.report.figures import figures_svg
from cfkv.report.html import render_report

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Checker(HTMLParser):
    """Checks nesting; collects ids, links, tags and the cells of two-column rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.stack.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "xlink:href", "data", "action"):
                self.loads.append(value or "")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td") and self.rows:
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.rows and self.stack and {"td", "th"} & set(self.stack):
            self.rows[-1][-1] += data


def check(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.stack == []
    assert len(checker.ids) == len(set(checker.ids))
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in checker.loads)
    assert {load[1:] for load in checker.loads if load.startswith("#")} <= set(checker.ids)
    assert not checker.tags & {"script", "iframe", "object", "embed", "link", "img"}
    assert "@import" not in html
    return checker


def render(**changes: Any) -> str:
    given: dict[str, Any] = {
        "title": "A run <of> cfkv",
        "manifest": manifest(),
        "config": ReportConfig(),
        **tables(),
    }
    given |= changes
    if "figures_svg" not in given:
        given["figures_svg"] = figures_svg(given["correlations"])
    return render_report(**given)


@pytest.fixture(scope="module")
def page() -> str:
    return render()


def test_well_formed_and_self_contained(page: str) -> None:
    checker = check(page)
    assert checker.tags >= {"svg", "table", "details", "style"}
    outside_svg = re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    assert "http://" not in outside_svg
    assert "https://" not in outside_svg


def test_counts_are_those_counted_by_hand(page: str) -> None:
    rows = {row[0]: row[1] for row in check(page).rows if len(row) == 2}
    expected = {
        "problems": "6",
        "traces": "7",
        "correct": "5",
        "incorrect": "1",
        "failed": "1",
        "too_long, e.g.: 2100 tokens > <b>2048</b>": "1",
        "traces labelled": "4",
        "traces excluded: the answer from the unmodified context differs": "1",
        "traces failed": "0",
        "windows tested": "11",
        "flipped the answer": "5 (45.5 %)",
        "gave a complete answer": "10 (90.9 %)",
        "draft accepted in full, nothing decoded": "6 (54.5 %)",
        "mean number of draft tokens accepted": "2.1",
        "windows failed": "1",
        "important tokens, of the tested ones in 4 labelled traces": "9 of 32 (28.1 %)",
        "group hidden": "3 of 4",
    }
    assert {name: rows[name] for name in expected} == expected


def test_text_from_a_model_is_escaped(page: str) -> None:
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert "<b>2048</b>" not in page
    assert "A run &lt;of&gt; cfkv" in page


@pytest.mark.parametrize(("wanted", "shown"), [(3, 3), (4, 4), (50, 7)])
def test_traces_shown(wanted: int, shown: int) -> None:
    html = render(config=ReportConfig(traces=wanted), figures_svg={})
    assert html.count('<article class="trace"') == shown
    assert html.count('class="t imp" style="--a:0.') + html.count('class="t imp" style="--a:1.00') > 6


@pytest.mark.parametrize(
    ("adjusted", "said"), [(0.05, True), (0.7, True), (0.0499, False), (math.nan, False)]
)
def test_not_significant_is_said_where_it_is_so(adjusted: float, said: bool) -> None:  # noqa: FBT001
    html = render(correlations=correlations(adjusted_pvalue=adjusted), figures_svg={})
    assert ("not significant" in html) is said
    assert ("no test" in html) is math.isnan(adjusted)


def test_estimates_are_written_with_their_intervals(page: str) -> None:
    texts = [" ".join(cell.split()) for row in check(page).rows for cell in row]
    assert "0.320[0.220, 0.420]p 0.004" in texts
    assert "−0.180[−0.280, −0.080]p 0.004" in texts
    assert "0.820[0.720, 0.920]p 0.004" in texts
    assert "within-trace ρ: 16 of 16 tests" in page
    assert "All 16 rows" in page


def test_top_rows_are_the_largest_within_each_signal(page: str) -> None:
    top = page.partition("<details>")[0]
    rows = [row for row in check(page).rows if row and row[0] == "key_norm"]
    assert top.count('<th scope="row">key_norm</th>') == 3
    assert [row[1] for row in rows[:3]] == ["emb", "emb", "0"]


def test_missing_estimate_shows_its_reason() -> None:
    rows = [
        correlation("flat", 0, "raw", "spearman_within", math.nan, nan_reason="constant <signal>"),
        correlation("flat", 0, "raw", "auroc", math.nan, nan_reason="one class only"),
    ]
    html = render(correlations=frame(schemas.CORRELATIONS, rows))
    check(html)
    assert "constant &lt;signal&gt;" in html
    assert "one class only" in html
    assert "not measured" in html


def test_signal_without_estimates_has_one_row_at_the_top() -> None:
    rows = [correlation("flat", layer, "raw", "spearman_within", math.nan) for layer in range(4)]
    html = render(correlations=frame(schemas.CORRELATIONS, rows), figures_svg={})
    top, _, full = html.partition("<details>")
    assert top.count('<th scope="row">flat</th>') == 1
    assert full.count('<th scope="row">flat</th>') == 4
    assert "no reason recorded" in top


def test_failures_are_listed(page: str) -> None:
    rows = [tuple(row) for row in check(page).rows if len(row) == 5]
    assert ("traces", "t7", "", "too_long", "2100 tokens > <b>2048</b>") in rows
    assert ("token_labels", "t5", "occlusion", "excluded", "") in rows
    assert ("windows", "t4", "occlusion window 2", "error", "out of memory") in rows
    assert ("probed", "t4", "hidden", "error", "NaN in layer 2") in rows
    assert len([row for row in rows if row[0] != "table"]) == 4


def test_many_failures_are_cut_and_counted() -> None:
    windows = [window(1, index, status="error", reason="x") for index in range(230)]
    html = render(windows=frame(schemas.WINDOWS, windows), figures_svg={})
    assert "33 more are in the run’s tables." in html  # with the trace, the label and the probe


def test_what_was_run_is_told(page: str) -> None:
    for text in (
        "builtin (revision r1)",
        "window 32, stride 16, replacement auto, replacement token id 0",
        "0–2, emb",
        "00112233aabbccdd",
        "the null window flips nothing: 0 of 4",
        "python 3.11.2, torch 2.8.0",
        "dataset: registers\nmode: generate",
        "no claim about large reasoning models",
    ):
        assert text in page


def test_empty_tables_render_with_a_plain_sentence() -> None:
    html = render(manifest={}, **empty_tables())
    check(html)
    assert "No trace was labelled" in html
    assert "The run has no record of its stages" in html
    assert "Nothing was skipped or excluded, and nothing failed." in html


def test_no_labelled_trace_and_no_correlations() -> None:
    excluded = [label(1, (), status="excluded", importance=None, value=None)]
    html = render(
        token_labels=frame(schemas.TOKEN_LABELS, excluded), correlations=empty_tables()["correlations"]
    )
    check(html)
    assert "No trace was labelled with this kind" in html
    assert "There are no correlations for this label kind" in html


def test_correlations_without_labels_render() -> None:
    nothing = empty_tables()
    html = render(token_labels=nothing["token_labels"], windows=nothing["windows"])
    check(html)
    assert "no labels in this run" in html


def test_two_kinds_have_their_own_sections_and_ids() -> None:
    rows = tables()
    both = {
        name: pl.concat([rows[name], rows[name].with_columns(kind=pl.lit("knock out"))])
        for name in ("windows", "token_labels", "correlations")
    }
    html = render(**both)
    checker = check(html)
    assert {"labels-occlusion", "labels-knock-out"} <= set(checker.ids)
    assert html.count("<svg") == 4


@pytest.mark.parametrize(
    "odd", [{"stages": None}, {"stages": {"trace": None}}, {"stages": {"trace": {"config": None}}}]
)
def test_incomplete_manifests_do_not_stop_the_report(odd: dict[str, Any]) -> None:
    check(render(manifest=odd, figures_svg={}))


def graded_tables() -> dict[str, pl.DataFrame]:
    """Three labelled traces of eviction_kl: 8 tested tokens each, values 0 to .7, one checkpoint, two removals."""
    labels = [
        label(
            number,
            (),
            kind="eviction_kl",
            importance=[-1] * 14,
            value=[(0.1 * (i - 2) if 2 <= i < 10 else math.nan) for i in range(14)],
            control_answer=None,
            control_agrees=None,
            n_flipped=None,
            n_windows=2,
        )
        for number in range(1, 4)
    ]
    removals = [
        {"trace_id": f"t{number}", "kind": "eviction_kl", "scope": "all", "step": 10, "block_index": index}
        | {"blocks": [{"start": 2 + 4 * index, "stop": 6 + 4 * index}], "kl": 0.1 * index, "null_kl": 0.05}
        for number in range(1, 4)
        for index in range(2)
    ]
    return tables() | {
        "windows": empty_tables()["windows"],
        "eviction_kl": frame(schemas.EVICTION_KL, removals),
        "token_labels": frame(schemas.TOKEN_LABELS, labels),
        "correlations": correlations().with_columns(kind=pl.lit("eviction_kl")),
    }


def test_a_graded_kind_speaks_of_high_damage() -> None:
    """.25 of 8 tokens are 2: the values .6 and .7 at positions 8 and 9. Each trace has a removal of KL 0 < .05."""
    rows = graded_tables()
    html = render(
        **rows,
        high_damage=0.25,
        figures_svg=figures_svg(rows["correlations"], graded={"eviction_kl"}),
    )
    counted = {row[0]: row[1] for row in check(html).rows if len(row) == 2}
    assert counted["removals replayed"] == "6"
    assert counted["checkpoints, in 3 traces"] == "3"
    assert counted["removals whose KL is at most the null KL of their checkpoint"] == "3 of 6"
    assert counted["high damage tokens, of the tested ones in 3 labelled traces"] == "6 of 24 (25.0 %)"
    assert "windows tested" not in counted
    assert "3 traces labelled, 25.0 % of 24 tested tokens high damage." in " ".join(html.split())
    assert "between signal and high damage, n = 4 traces" in html
    assert "among the largest 25 % of its trace" in html
    assert "high damage 1 · value 0.700 nats" in html
    assert html.count('class="t imp" style="--a:1.00"') == 3
    assert "token importance" not in html
