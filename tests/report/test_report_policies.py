"""The section of policies, and its figure: the numbers are those counted by hand, and absent without evaluations."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.text import Text
from report_frames import RIGHT, correlations, empty_tables, evaluation, evaluations, frame, manifest
from test_report_html import check, render

from cfkv import schemas
from cfkv.report.accuracy import MAX_LABELLED, REST, accuracy_figure, accuracy_rows, spread
from cfkv.report.figures import figures_svg, write_figures
from cfkv.report.policies import PolicyResults, policy_results, policy_sections
from cfkv.report.text import number


@pytest.fixture(scope="module")
def results() -> PolicyResults:
    found = policy_results(evaluations())
    assert found is not None
    return found


@pytest.fixture(scope="module")
def page(results: PolicyResults) -> str:
    svg = figures_svg(correlations(), accuracy=results.accuracy)
    return render(policies=results, figures_svg=svg)


def test_absent_without_evaluations() -> None:
    assert policy_results(frame(schemas.EVALUATIONS, [])) is None
    html = render()
    assert 'id="policies"' not in html
    assert "#policies" not in html
    assert "yardstick" not in html


def test_section_is_well_formed_and_told_of(page: str) -> None:
    checker = check(page)
    assert {"policies", "policies-forced"} <= set(checker.ids)
    assert '<a href="#policies">Policies</a>' in page
    assert "13 arms, 4 policies, 19–20 graded traces an arm" in page
    # Full: 18 of 20, Wilson .699 to .972.
    assert "With the full cache 0.900 [0.699, 0.972] of 20 answers to 20 problems are correct." in page
    assert "Other figures" not in page
    assert "knorm &lt;b&gt;" in page
    assert "knorm <b>" not in page
    assert page.index('id="policies"') < page.index('id="failures"')


def test_table_has_the_shares_and_what_was_tested(page: str) -> None:
    rows = [row for row in check(page).rows if len(row) == 4 and row[0] in RIGHT]
    assert [row[0] for row in rows] == ["oracle", "h2o", "random", "knorm <b>"]
    by_name = {row[0]: row[1:] for row in rows}
    # 14 of 20; against 2: twelve wins; against 18: four losses, 2/2^4 = .125 before adjustment.
    assert by_name["oracle"][0].startswith("0.70[0.48, 0.85]")
    assert re.search(r"random: better, p 0\.001\nfull: not significant, p 0\.125", by_name["oracle"][0])
    # 15 of the 19 that did not fail.
    assert by_name["h2o"][1].startswith("0.79[")
    # Random has no test against itself: sixteen losses against full.
    assert "random:" not in by_name["random"][0]
    assert "full: worse, p < 0.001" in by_name["random"][0]
    assert "not significant" in by_name["knorm <b>"][0]


def test_failures_and_costs_are_shown(page: str) -> None:
    rows = check(page).rows
    assert ["evaluations", "t19", "forced,h2o,64", "out_of_memory", "out of <i>memory</i>"] in rows
    assert "<i>memory" not in page
    arms = {(row[0], row[1]): row[2:] for row in rows if len(row) == 14 and row[1] != "budget"}
    assert len(arms) == 13
    # .5 s for 10 steps; 48 of 64 slots are full on average.
    assert arms["h2o", "64"][:4] == ["64", "physical", "19", "1"]
    assert arms["h2o", "64"][4:] == [
        "0.79 of 19",
        "0.0 %",
        "0.0 %",
        "48",
        "64",
        "5",
        "50.0",
        "3.00",
    ]
    assert arms["full", "all"][:3] == ["–", "none", "20"]


def test_seconds_per_token_are_of_the_steps(results: PolicyResults) -> None:
    """.5 s for 10 steps."""
    (section,) = policy_sections(results, {})
    assert {line[12] for line in section["arms"]} == {"50.0"}


def test_zero_without_decimals() -> None:
    assert [number(value, 0) for value in (0.0, -0.2, 0.6)] == ["0", "0", "1"]


def test_lossless_budgets_by_hand(results: PolicyResults) -> None:
    """Of the 18 that full answers: h2o 10 at 32, 5 more at 64, 2 more at 256, one never."""
    (section,) = policy_sections(results, {})
    lines = {line[0]: line[1:] for line in section["lossless"]}
    # The ninth and tenth of 18 need 32.
    assert lines["h2o"][:3] == ["17 of 18", "32", "32"]
    # Two at 32, four at 64, six at 256, six never: the median is at 256.
    assert lines["random"][:3] == ["12 of 18", "256", "256"]
    assert lines["oracle"][3] == "1.00 over 18"
    assert {line[4] for line in lines.values()} == {"0"}


def test_files(results: PolicyResults, tmp_path: Path) -> None:
    written = write_figures(empty_tables()["correlations"], tmp_path, accuracy=results.accuracy)
    assert {path.name for path in written} == {"accuracy.csv", "accuracy-forced.png", "accuracy-forced.svg"}
    told = pl.read_csv(tmp_path / "accuracy.csv").filter(pl.col("policy") != "full")
    assert told.height == 12
    drawn = []
    for line in accuracy_figure(results.accuracy, "forced").axes[0].get_lines():
        if len(line.get_xdata()) == 3:
            drawn += zip(line.get_xdata(), line.get_ydata(), strict=True)
    assert sorted(drawn) == sorted(told.select("kept_mean", "accuracy").rows())


def test_bars_are_the_intervals_and_full_is_a_line(results: PolicyResults) -> None:
    axis = accuracy_figure(results.accuracy, "forced").axes[0]
    bars = {tuple(np.round(path.vertices[:, 1], 6)) for part in axis.collections for path in part.get_paths()}
    rows = accuracy_rows(results.accuracy, "forced").filter(pl.col("policy") != "full")
    assert bars == {(round(low, 6), round(high, 6)) for low, high in rows.select("low", "high").iter_rows()}
    levels = [line.get_ydata()[0] for line in axis.get_lines() if len(set(line.get_ydata())) == 1]
    assert 0.9 in levels
    names = {text.get_text() for text in axis.texts}
    assert names == {"full cache", *RIGHT}


def test_at_most_ten_lines_are_named() -> None:
    policies = ["random", "oracle", *(f"policy_{number:02}" for number in range(15))]
    rows = [
        evaluation(number, policy, budget, correct=number < 3 + place % 5)
        for place, policy in enumerate(policies)
        for budget in ("32", "64")
        for number in range(8)
    ]
    found = policy_results(frame(schemas.EVALUATIONS, rows))
    assert found is not None
    figure = accuracy_figure(found.accuracy, "forced")
    axis = figure.axes[0]
    assert len(axis.texts) == MAX_LABELLED
    assert {"random", "oracle"} <= {text.get_text() for text in axis.texts}
    grey = [line for line in axis.get_lines() if to_rgba(line.get_color()) == to_rgba(REST)]
    assert len(grey) == 7
    assert "7 further policies (see table)" in [text.get_text() for text in figure.legends[0].get_texts()]
    figure.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(text) for text in axis.texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1 for below, above in zip(boxes, boxes[1:], strict=False))


def test_nothing_to_draw() -> None:
    rows = [
        evaluation(1, "full", "all", correct=True),
        evaluation(1, "h2o", "32", correct=None, status="out_of_memory"),
    ]
    found = policy_results(frame(schemas.EVALUATIONS, rows))
    assert found is not None
    assert figures_svg(empty_tables()["correlations"], accuracy=found.accuracy) == {}
    assert "No policy has an accuracy" in accuracy_figure(found.accuracy, "forced").texts[0].get_text()
    html = render(policies=found, manifest=manifest(), figures_svg={})
    check(html)
    assert "no graded rows" in html
    assert "No arm could be tested." in html


@given(st.lists(st.floats(0, 1), max_size=15).map(sorted))
def test_names_are_moved_apart(heights: list[float]) -> None:
    placed = spread(heights, 0.05, 0.0, 1.0)
    assert len(placed) == len(heights)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in placed)
    assert all(b - a >= 0.05 - 1e-9 for a, b in zip(placed, placed[1:], strict=False))
    if all(b - a >= 0.05 for a, b in zip(heights, heights[1:], strict=False)):
        assert placed == pytest.approx(heights)


def test_names_that_do_not_fit_stand_evenly() -> None:
    assert spread([0.5] * 5, 0.4, 0.0, 1.0) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert spread([], 0.1, 0, 1) == []
