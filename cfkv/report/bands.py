"""The band figure: each signal's rank correlation with importance, layer by layer, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from cfkv.report.style import LINES, OTHER_LINE, empty_figure, styled
from cfkv.report.text import MEASURES, NULL_VALUE, SIGNIFICANCE, layer_name, span

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND_SMOOTHINGS = ("raw", "rolling_z")  # more bands than two hide each other
BAND_COLUMNS = (
    *("kind", "signal", "layer", "smoothing", "measure", "estimate", "low", "high", "level"),
    *("adjusted_pvalue", "significant", "n_traces", "n_tokens", "n_important", "nan_reason"),
)


def band_rows(
    correlations: pl.DataFrame,
    kind: str,
    *,
    measure: str = "spearman_within",
    smoothings: Sequence[str] | None = None,
) -> pl.DataFrame:
    """The rows that `band_figure` draws, one per point, with `significant` = adjusted p below 5 %.

    `smoothings` None takes raw and rolling_z where they exist, else all there are. Rows of
    signals without layers have no place on the x axis and are left out.
    """
    rows = correlations.filter(
        pl.col("kind") == kind,
        pl.col("measure") == measure,
        pl.col("control") == "none",
        pl.col("layer").is_not_null(),
    )
    present = rows["smoothing"].unique(maintain_order=True).to_list()
    chosen = smoothings or [name for name in BAND_SMOOTHINGS if name in present] or present
    signals = rows["signal"].unique(maintain_order=True).to_list()
    return (
        rows.filter(pl.col("smoothing").is_in(list(chosen)))
        .with_columns(
            significant=(pl.col("adjusted_pvalue").fill_nan(None) < SIGNIFICANCE).fill_null(value=False),
            _signal=pl.col("signal").replace_strict(signals, range(len(signals)), return_dtype=pl.Int32),
            _smoothing=pl.col("smoothing").replace_strict(
                [*chosen], range(len(chosen)), return_dtype=pl.Int32, default=None
            ),
        )
        .sort("_signal", "_smoothing", "layer")
        .select(BAND_COLUMNS)
    )


def band_figure(
    correlations: pl.DataFrame,
    kind: str,
    *,
    measure: str = "spearman_within",
    smoothings: Sequence[str] | None = None,
    subject: str = "token importance",
) -> Figure:
    """Estimate by layer with its interval as a band: one panel per signal, one line per smoothing.

    Filled markers have an adjusted p-value below 5 %, hollow ones have not; a grey cross stands where there
    is no estimate. `subject` is what the signals are held against.
    """
    from matplotlib.figure import Figure

    rows = band_rows(correlations, kind, measure=measure, smoothings=smoothings)
    signals = rows["signal"].unique(maintain_order=True).to_list()
    with styled():
        if not signals:
            return empty_figure(f"No {MEASURES.get(measure, measure)} per layer for the label kind {kind!r}.")
        columns = min(len(signals), 2 if len(signals) in (2, 4) else 3 if len(signals) < 7 else 4)
        n_rows = -(-len(signals) // columns)
        figure = Figure(figsize=(max(8.6, 2.75 * columns), 2.15 * n_rows + 1.35), layout="constrained")
        axes = figure.subplots(n_rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        layers = rows["layer"].unique().sort().to_list()
        for place, (axis, signal) in enumerate(zip(axes, signals, strict=False)):
            _draw_panel(axis, rows.filter(pl.col("signal") == signal), measure)
            axis.set_title(signal, loc="left", fontweight="bold")
            _layer_ticks(axis, layers, room=2.3)
            lowest = place + columns >= len(signals)
            axis.tick_params(labelbottom=lowest)
            axis.set_xlabel("layer (emb = embedding output)" if lowest and -1 in layers else "layer" * lowest)
        for axis in axes[len(signals) :]:
            axis.set_visible(False)
        name = MEASURES.get(measure, measure).replace("ρ", "Spearman ρ")
        figure.supylabel(f"{name}{' (−1 to 1)' if 'spearman' in measure else ' (0 to 1)'}", fontsize=9)
        figure.suptitle(
            f"{kind}: {name} between signal and {subject}, n = {span(rows['n_traces'])} traces",
            fontsize=11,
            x=0.01,
            ha="left",
        )
        _legend(figure, rows)
        _limits(axes[0], rows, measure)
    return figure


def _draw_panel(axis: Axes, rows: pl.DataFrame, measure: str) -> None:
    import numpy as np

    axis.axhline(NULL_VALUE.get(measure, 0.0), color="#444444", linewidth=0.8, zorder=1)
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.6, zorder=0)
    dense = rows["layer"].n_unique() > 12
    for smoothing in rows["smoothing"].unique(maintain_order=True):
        line = rows.filter(pl.col("smoothing") == smoothing)
        colour, marker, dash = LINES.get(smoothing, OTHER_LINE)
        x, y = line["layer"].to_numpy(), line["estimate"].fill_null(float("nan")).to_numpy()
        low, high = (line[name].fill_null(float("nan")).to_numpy() for name in ("low", "high"))
        axis.fill_between(x, low, high, facecolor=colour, alpha=0.18, linewidth=0, zorder=2)
        alone = _alone(np.isfinite(y))
        axis.vlines(x[alone], low[alone], high[alone], color=colour, alpha=0.4, linewidth=2.5, zorder=2)
        axis.plot(x, y, color=colour, linestyle=dash, linewidth=1.1, zorder=3)
        for flag, face in ((True, colour), (False, "white")):
            at = line["significant"].to_numpy() == flag
            axis.plot(
                x[at],
                y[at],
                linestyle="none",
                marker=marker,
                markersize=3.2 if dense else 5,
                markerfacecolor=face,
                markeredgecolor=colour,
                markeredgewidth=0.8,
                zorder=4,
            )
    missing = rows.filter(pl.col("estimate").is_null() | pl.col("estimate").is_nan())["layer"].unique()
    null = NULL_VALUE.get(measure, 0.0)
    axis.plot(missing, [null] * len(missing), linestyle="none", marker="x", color="#777777", zorder=5)


def _alone(present: np.ndarray) -> np.ndarray:
    """Points without a neighbour: a shaded band has no width there, so they get a bar."""
    alone = present.copy()
    alone[1:] &= ~present[:-1]
    alone[:-1] &= ~present[1:]
    return alone


def _layer_ticks(axis: Axes, layers: list[int], room: float) -> None:
    """Label as many layers as `room` inches take, `emb` always among them."""
    blocks = [layer for layer in layers if layer >= 0]
    most = int(room / 0.28)
    step = next((step for step in (1, 2, 4, 5, 10, 20, 50) if len(layers) <= most * step), 100)
    ticks = [layer for layer in blocks if layer % step == 0]
    if -1 in layers:
        ticks = [-1, *(tick for tick in ticks if step == 1 or tick > 0)]
    axis.set_xticks(ticks, [layer_name(tick) for tick in ticks])
    axis.set_xticks(layers, minor=True)
    axis.tick_params(which="minor", length=1.8)
    axis.set_xlim(min(layers) - 0.6, max(layers) + 0.6)


def _limits(axis: Axes, rows: pl.DataFrame, measure: str) -> None:
    values = [
        value
        for name in ("estimate", "low", "high")
        for value in rows[name].fill_nan(None).drop_nulls().to_list()
    ]
    null = NULL_VALUE.get(measure, 0.0)
    low, high = min([*values, null - 0.05]), max([*values, null + 0.05])
    margin = 0.06 * (high - low)
    axis.set_ylim(low - margin, high + margin)


def _legend(figure: Figure, rows: pl.DataFrame) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for smoothing in rows["smoothing"].unique(maintain_order=True):
        colour, marker, dash = LINES.get(smoothing, OTHER_LINE)
        handles.append(
            Line2D([], [], color=colour, marker=marker, linestyle=dash, markersize=5, label=smoothing)
        )
    level = rows["level"].fill_nan(None).drop_nulls()
    if len(level):
        handles.append(
            Patch(color="#999999", alpha=0.35, linewidth=0, label=f"{100 * level[0]:.0f} % interval")
        )
    grey: dict[str, Any] = {"color": "#555555", "linestyle": "none", "marker": "o", "markersize": 5}
    handles.append(Line2D([], [], **grey, label="filled: adjusted p < .05"))
    handles.append(Line2D([], [], **grey, markerfacecolor="white", label="hollow: not significant"))
    if rows["estimate"].fill_nan(None).null_count():
        handles.append(
            Line2D([], [], color="#777777", linestyle="none", marker="x", label="no estimate (see table)")
        )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        handlelength=2.2,
        columnspacing=1.4,
    )
