"""Every figure of a run, as SVG text for the page or as files with the table that each was drawn from."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from cfkv.report.auroc import auroc_figure, auroc_rows
from cfkv.report.bands import band_figure, band_rows
from cfkv.report.meanings import wording
from cfkv.report.style import styled
from cfkv.report.text import slug

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
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
    correlations: pl.DataFrame, *, measure: str = "spearman_within", graded: Collection[str] = ()
) -> dict[str, Figure]:
    """Every figure by its name, `bands-KIND` and `auroc-KIND`, for each label kind that has an estimate.

    `graded` kinds speak of high damage instead of importance.
    """
    figures: dict[str, Figure] = {}
    for kind in correlations["kind"].unique(maintain_order=True):
        subject = wording(kind, graded=kind in graded).subject
        if band_rows(correlations, kind, measure=measure)["estimate"].is_finite().any():
            figures[f"bands-{slug(kind)}"] = band_figure(correlations, kind, measure=measure, subject=subject)
        if auroc_rows(correlations, kind)["estimate"].is_finite().any():
            figures[f"auroc-{slug(kind)}"] = auroc_figure(correlations, kind, subject=subject)
    return figures


def figures_svg(
    correlations: pl.DataFrame, *, measure: str = "spearman_within", graded: Collection[str] = ()
) -> dict[str, str]:
    """The figures as SVG texts, by name: what `render_report` puts into the page."""
    drawn = draw_figures(correlations, measure=measure, graded=graded)
    return {name: svg_text(figure) for name, figure in drawn.items()}


def write_figures(
    correlations: pl.DataFrame,
    directory: Path,
    *,
    measure: str = "spearman_within",
    graded: Collection[str] = (),
) -> list[Path]:
    """Write each figure as PNG and SVG into `directory`, and the plotted values as bands.csv and auroc.csv.

    Returns the files written; a table without rows has none.
    """

    directory.mkdir(parents=True, exist_ok=True)
    kinds = correlations["kind"].unique(maintain_order=True).to_list()
    written: list[Path] = []
    tables = {
        "bands": [band_rows(correlations, kind, measure=measure) for kind in kinds],
        "auroc": [auroc_rows(correlations, kind) for kind in kinds],
    }
    for name, parts in tables.items():
        if not any(len(part) for part in parts):
            continue
        path = directory / f"{name}.csv"
        pl.concat(parts).write_csv(path)
        written.append(path)
    for name, figure in draw_figures(correlations, measure=measure, graded=graded).items():
        png, svg = directory / f"{name}.png", directory / f"{name}.svg"
        with styled():
            figure.savefig(png, format="png", dpi=DPI)
        svg.write_text(svg_text(figure), encoding="utf-8")
        written += [png, svg]
    return written
