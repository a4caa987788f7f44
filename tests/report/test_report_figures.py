"""Figures: the files, and that the source tables hold what is drawn."""

from __future__ import annotations

import math
import re
from pathlib import Path

import polars as pl
import pytest
from matplotlib.colors import to_rgba
from report_frames import correlation, correlations, empty_tables, frame

from cfkv import schemas
from cfkv.report.figures import (
    DPI,
    auroc_figure,
    band_figure,
    band_rows,
    draw_figures,
    figures_svg,
    write_figures,
)
from cfkv.report.style import LINES
from cfkv.report.svg import inline_svg


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("figures")
    return {path.name: path for path in write_figures(correlations(), directory)}


def test_files(written: dict[str, Path]) -> None:
    from PIL import Image

    assert set(written) == {
        *("bands.csv", "bands-occlusion.png", "bands-occlusion.svg"),
        *("auroc.csv", "auroc-occlusion.png", "auroc-occlusion.svg"),
    }
    assert all(path.stat().st_size > 500 for path in written.values())
    for name, figure in draw_figures(correlations()).items():
        with Image.open(written[f"{name}.png"]) as image:
            width, height = figure.get_size_inches() * DPI
            assert image.size == (int(width), int(height))
            assert len(image.convert("L").getcolors(1 << 16) or []) > 10, "an empty picture"


def test_csv_is_what_is_drawn(written: dict[str, Path]) -> None:
    table = pl.read_csv(written["bands.csv"])
    figure = band_figure(correlations(), "occlusion")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["hidden_diff", "key_norm"]
    colours = {to_rgba(LINES[name][0]): name for name in ("raw", "rolling_z")}
    drawn = []
    for axis in figure.axes:
        for line in axis.get_lines():
            if line.get_linestyle() != "None" and to_rgba(line.get_color()) in colours:
                smoothing = colours[to_rgba(line.get_color())]
                points = zip(line.get_xdata(), line.get_ydata(), strict=True)
                drawn += [(axis.get_title(loc="left"), smoothing, int(x), y) for x, y in points]
    told = table.select("signal", "smoothing", "layer", "estimate").rows()
    assert len(told) == 16
    assert sorted(drawn) == sorted(told)
    assert set(table["measure"]) == {"spearman_within"}
    assert table["significant"].all()


def test_bands_span_the_intervals() -> None:
    figure = band_figure(correlations(), "occlusion")
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.3 - 0.01 - 0.1)
    assert band[:, 1].max() == pytest.approx(0.3 + 0.02 + 0.1)


@pytest.mark.parametrize(("pvalue", "faces"), [(0.049, {"full"}), (0.05, {"hollow"}), (math.nan, {"hollow"})])
def test_marker_tells_significance(pvalue: float, faces: set[str]) -> None:
    figure = band_figure(correlations(adjusted_pvalue=pvalue), "occlusion")
    found = set()
    for line in figure.axes[0].get_lines():
        if line.get_marker() in "oD" and len(line.get_xdata()):
            white = to_rgba(line.get_markerfacecolor()) == to_rgba("white")
            if line.get_linestyle() == "None":
                found.add("hollow" if white else "full")
    assert found == faces


def test_missing_estimate_is_a_cross_and_a_gap() -> None:
    rows = [
        correlation("a", layer, "raw", "spearman_within", math.nan if layer == 1 else 0.2)
        for layer in range(3)
    ]
    figure = band_figure(frame(schemas.CORRELATIONS, rows), "occlusion")
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[1]]
    assert "no estimate (see table)" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_measure_and_smoothings_are_arguments() -> None:
    rows = band_rows(correlations(), "occlusion", measure="spearman_pooled", smoothings=["rolling_z"])
    assert set(rows["measure"]) == {"spearman_pooled"}
    assert set(rows["smoothing"]) == {"rolling_z"}
    figure = band_figure(correlations(), "occlusion", measure="spearman_pooled", smoothings=["rolling_z"])
    assert "pooled" in figure.get_suptitle()
    assert "n = 4 traces" in figure.get_suptitle()


@pytest.mark.parametrize("layers", [4, 32])
def test_layer_labels_do_not_overlap(layers: int) -> None:
    rows = [
        correlation(f"signal_{number}", layer, "raw", measure, 0.1)
        for number in range(5)
        for layer in range(-1, layers)
        for measure in ("spearman_within", "auroc")
    ]
    table = frame(schemas.CORRELATIONS, rows)
    for figure in (band_figure(table, "occlusion"), auroc_figure(table, "occlusion")):
        figure.draw_without_rendering()
        for axis in figure.axes:
            boxes = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
            assert all(left.x1 <= right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
        shown = [label.get_text() for axis in figure.axes for label in axis.get_xticklabels()]
        assert {"emb", "5" if layers == 32 else "3"} <= set(shown)


def test_svg_is_closed_in_itself_and_reproducible() -> None:
    first, second = figures_svg(correlations()), figures_svg(correlations())
    assert first == second
    for svg in first.values():
        references = re.findall(r'(?:href="|url\()([^")]*)', svg)
        assert all(reference.startswith(("#", "data:")) for reference in references)


def test_inline_svg_has_its_own_ids() -> None:
    svg = figures_svg(correlations())["bands-occlusion"]
    one, two = (inline_svg(svg, prefix, "a <figure>") for prefix in ("one", "two"))
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', one)) <= ids[0]
    assert one.startswith("<svg")
    assert 'aria-label="a &lt;figure&gt;"' in one
    assert "DOCTYPE" not in one


def test_nothing_to_draw(tmp_path: Path) -> None:
    nothing = empty_tables()["correlations"]
    assert write_figures(nothing, tmp_path) == []
    assert figures_svg(nothing) == {}
    assert "No within-trace" in band_figure(nothing, "occlusion").texts[0].get_text()
    assert "No AUROC" in auroc_figure(nothing, "occlusion").texts[0].get_text()


def test_signals_without_layers_are_left_out() -> None:
    row = correlation("entropy", 0, "raw", "spearman_within", 0.1) | {"layer": None}
    table = frame(schemas.CORRELATIONS, [row])
    assert draw_figures(table) == {}
