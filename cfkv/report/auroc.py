"""The AUROC map: signals by layers, for the raw and the detrended signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from cfkv.report.bands import band_rows
from cfkv.report.style import empty_figure, styled
from cfkv.report.text import layer_name, span

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def auroc_rows(correlations: pl.DataFrame, kind: str) -> pl.DataFrame:
    """The rows that `auroc_figure` draws: the raw and the rolling_z AUROC (else the first smoothing's)."""
    present = correlations.filter(pl.col("kind") == kind, pl.col("measure") == "auroc")["smoothing"]
    chosen = [name for name in ("raw", "rolling_z") if name in present] or present.unique(
        maintain_order=True
    ).to_list()[:1]
    return band_rows(correlations, kind, measure="auroc", smoothings=chosen or None)


def auroc_figure(correlations: pl.DataFrame, kind: str, *, subject: str = "token importance") -> Figure:
    """AUROC of each signal (rows) and layer (columns) as a map centred at .5.

    A dot marks an adjusted p-value below 5 %. `subject` is what the signals are held against.
    """
    import numpy as np
    from matplotlib.figure import Figure

    rows = auroc_rows(correlations, kind)
    with styled():
        if not len(rows):
            return empty_figure(f"No AUROC per layer for the label kind {kind!r}.")
        signals = rows["signal"].unique(maintain_order=True).to_list()
        layers = rows["layer"].unique().sort().to_list()
        smoothings = rows["smoothing"].unique(maintain_order=True).to_list()
        written = len(layers) <= 9
        side_by_side = written or len(layers) <= 16
        shape = (1, len(smoothings)) if side_by_side else (len(smoothings), 1)
        height = 0.3 * len(signals) + 0.6
        figure = Figure(figsize=(11, height * shape[0] + 0.95), layout="constrained")
        axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
        estimates = rows["estimate"].fill_nan(None).drop_nulls().to_list()
        spread = max([0.1, *(abs(estimate - 0.5) for estimate in estimates)])
        mesh: Any = None
        for axis, smoothing in zip(axes, smoothings, strict=True):
            cells = np.full((len(signals), len(layers)), np.nan)
            for row in rows.filter(pl.col("smoothing") == smoothing).iter_rows(named=True):
                y, x = signals.index(row["signal"]), layers.index(row["layer"])
                cells[y, x] = np.nan if row["estimate"] is None else row["estimate"]
                strong = abs(cells[y, x] - 0.5) > 0.6 * spread
                mark = "•" if row["significant"] else ""
                if written and not np.isnan(cells[y, x]):
                    mark = f"{cells[y, x]:.2f}".lstrip("0") + (" •" if row["significant"] else "")
                axis.text(
                    x, y, mark, ha="center", va="center", fontsize=8, color="white" if strong else "black"
                )
            axis.set_facecolor("#dddddd")
            edges = [np.arange(size + 1) - 0.5 for size in (len(layers), len(signals))]
            mesh = axis.pcolormesh(
                *edges,
                np.ma.masked_invalid(cells),
                cmap="PuOr_r",
                vmin=0.5 - spread,
                vmax=0.5 + spread,
                edgecolors="white",
                linewidth=0.6,
            )
            axis.set_title(smoothing, loc="left", fontweight="bold")
            axis.set_xticks(range(len(layers)), [layer_name(layer) for layer in layers])
            axis.set_yticks(range(len(signals)), signals)
            axis.set_ylim(len(signals) - 0.5, -0.5)
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)
        figure.colorbar(mesh, ax=list(axes), label="AUROC", fraction=0.025, pad=0.015)
        figure.supxlabel("layer (emb = embedding output; • adjusted p < .05; grey: no estimate)", fontsize=9)
        figure.suptitle(
            f"{kind}: AUROC of each signal for {subject}, n = {span(rows['n_traces'])} traces",
            fontsize=11,
            x=0.01,
            ha="left",
        )
    return figure
