"""Every figure of a run, as SVG text for the page or as files with the table that each was drawn from."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from cfkv.analysis._arms import FULL
from cfkv.report.accuracy import accuracy_figure, accuracy_rows
from cfkv.report.auroc import auroc_figure, auroc_rows
from cfkv.report.bands import band_figure, band_rows
from cfkv.report.meanings import wording
from cfkv.report.style import styled
from cfkv.report.text import slug

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "accuracy_figure",
    "accuracy_rows",
    "auroc_figure",
    "auroc_rows",
    "band_figure",
    "band_rows",
    "draw_figures",
    "figures_svg",
    "write_figures",
]

DPI = 160


def svg_text(figure: Figure) -> str:
    """A figure as SVG with text kept as text and no time stamp, so that equal figures give equal files."""

    buffer = io.StringIO()
    with styled():
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return buffer.getvalue()


def draw_figures(
    correlations: pl.DataFrame,
    *,
    measure: str = "spearman_within",
    graded: Collection[str] = (),
    accuracy: pl.DataFrame | None = None,
) -> dict[str, Figure]:
    """Every figure by its name: `bands-KIND` and `auroc-KIND` for each label kind that has an estimate, and
    `accuracy-MODE` for each mode in which a policy has an accuracy.

    `graded` kinds speak of high damage instead of importance. `accuracy` is the table `policy_accuracy`.
    """
    figures: dict[str, Figure] = {}
    for kind in correlations["kind"].unique(maintain_order=True):
        subject = wording(kind, graded=kind in graded).subject
        if band_rows(correlations, kind, measure=measure)["estimate"].is_finite().any():
            figures[f"bands-{slug(kind)}"] = band_figure(correlations, kind, measure=measure, subject=subject)
        if auroc_rows(correlations, kind)["estimate"].is_finite().any():
            figures[f"auroc-{slug(kind)}"] = auroc_figure(correlations, kind, subject=subject)
    for mode, rows in _accuracy_parts(accuracy).items():
        if accuracy is not None and (rows["policy"] != FULL).any():
            figures[f"accuracy-{slug(mode)}"] = accuracy_figure(accuracy, mode)
    return figures


def _accuracy_parts(accuracy: pl.DataFrame | None) -> dict[str, pl.DataFrame]:
    if accuracy is None:
        return {}
    return {mode: accuracy_rows(accuracy, mode) for mode in accuracy["mode"].unique().sort()}


def figures_svg(
    correlations: pl.DataFrame,
    *,
    measure: str = "spearman_within",
    graded: Collection[str] = (),
    accuracy: pl.DataFrame | None = None,
) -> dict[str, str]:
    """The figures as SVG texts, by name: what `render_report` puts into the page."""
    drawn = draw_figures(correlations, measure=measure, graded=graded, accuracy=accuracy)
    return {name: svg_text(figure) for name, figure in drawn.items()}


def write_figures(
    correlations: pl.DataFrame,
    directory: Path,
    *,
    measure: str = "spearman_within",
    graded: Collection[str] = (),
    accuracy: pl.DataFrame | None = None,
) -> list[Path]:
    """Write each figure as PNG and SVG into `directory`, and the plotted values as bands.csv, auroc.csv, accuracy.csv.

    Returns the files written; a table without rows has none.
    """

    directory.mkdir(parents=True, exist_ok=True)
    kinds = correlations["kind"].unique(maintain_order=True).to_list()
    written: list[Path] = []
    tables = {
        "bands": [band_rows(correlations, kind, measure=measure) for kind in kinds],
        "auroc": [auroc_rows(correlations, kind) for kind in kinds],
        "accuracy": list(_accuracy_parts(accuracy).values()),
    }
    for name, parts in tables.items():
        if not any(len(part) for part in parts):
            continue
        path = directory / f"{name}.csv"
        pl.concat(parts).write_csv(path)
        written.append(path)
    for name, figure in draw_figures(correlations, measure=measure, graded=graded, accuracy=accuracy).items():
        png, svg = directory / f"{name}.png", directory / f"{name}.svg"
        with styled():
            figure.savefig(png, format="png", dpi=DPI)
        svg.write_text(svg_text(figure), encoding="utf-8")
        written += [png, svg]
    return written
