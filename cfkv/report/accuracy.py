"""Accuracy against the tokens that were really kept: one line per policy, the full cache as a level."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from cfkv.analysis._arms import FULL, NAME, policy_name
from cfkv.analysis.compare import RANDOM
from cfkv.analysis.policy_table import policies_in_order
from cfkv.report.style import empty_figure, styled
from cfkv.report.text import known, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORACLE = "oracle"
MAX_LABELLED = 10
# Okabe and Ito's colours, each with its marker; the two landmarks have lines of their own.
LANDMARKS: dict[str, tuple[str, str, Any]] = {
    RANDOM: ("#000000", "X", (0, (1, 1))),
    ORACLE: ("#000000", "*", "--"),
}
POLICIES: tuple[tuple[str, str], ...] = (
    *(("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D")),
    *(("#56B4E9", "v"), ("#E69F00", "P"), ("#882255", "<"), ("#44AA99", ">")),
)
REST = "#c4c4c4"
BAR_POINTS = 2.6
COLUMNS = (
    *("mode", "policy", "parameters", "positions", "budget", "eviction", "slots_mean", "kept_mean"),
    *("accuracy", "low", "high", "level", "method", "n_graded", "n_problems", "n_failed"),
)


def accuracy_rows(accuracy: pl.DataFrame, mode: str) -> pl.DataFrame:
    """What `accuracy_figure` draws: the arms of a mode that have an accuracy and a number of kept tokens.

    `labelled` are random, oracle, and the best at the smallest budget, ten in all; the other lines are grey.
    """
    finite = pl.col("accuracy").is_finite() & ((pl.col("policy") == FULL) | pl.col("kept_mean").is_finite())
    rows = accuracy.filter((pl.col("mode") == mode) & finite).select(COLUMNS)
    order = policies_in_order(rows, mode)
    landmarks = [name for name in order if name[0] in LANDMARKS and name[1] == ""]
    chosen = [*landmarks, *(name for name in order if name not in landmarks)][:MAX_LABELLED]
    shown = {policy_name(*name) for name in chosen}
    rank = {policy_name(*name): place for place, name in enumerate(order)}
    names = [policy_name(*name) for name in rows.select(NAME).iter_rows()]
    return (
        rows.with_columns(
            labelled=pl.Series([name in shown for name in names], dtype=pl.Boolean),
            rank=pl.Series([rank.get(name, -1) for name in names], dtype=pl.Int64),
        )
        .sort("rank", "kept_mean")
        .drop("rank")
    )


def accuracy_figure(accuracy: pl.DataFrame, mode: str) -> Figure:
    """Accuracy of each policy against its mean number of kept tokens per KV head, with interval bars.

    The full cache is a horizontal line with its interval as a band. Random and oracle are drawn in black, at most ten
    lines are named and moved a little sideways, so that their bars can be told apart; the others are grey and without
    bars. The axis of tokens is logarithmic where it spans a factor of 6.
    """
    from matplotlib.figure import Figure

    rows = accuracy_rows(accuracy, mode)
    policies = rows.filter(pl.col("policy") != FULL)
    with styled():
        if not len(policies):
            return empty_figure(f"No policy has an accuracy in mode {mode!r}.")
        figure = Figure(figsize=(8.6, 5.0), layout="constrained")
        axis = figure.subplots()
        kept = policies["kept_mean"].to_numpy()
        if kept.min() > 0 and kept.max() / kept.min() > 6:
            axis.set_xscale("log")
        _limits(axis, kept)
        axis.grid(axis="y", color="#e4e4e4", linewidth=0.6, zorder=0)
        _draw_full(axis, rows)
        ends = _draw_policies(axis, policies)
        _ticks(axis, kept)
        _name_lines(axis, ends)
        axis.set_ylabel("accuracy")
        axis.set_xlabel("tokens kept per KV head (mean over the steps after the prompt)")
        figure.suptitle(
            f"{mode}: accuracy at real budgets, n = {span(rows['n_graded'])} answers an arm",
            fontsize=11,
            x=0.01,
            ha="left",
        )
        _legend(figure, rows)
    return figure


def _limits(axis: Axes, kept: np.ndarray) -> None:
    low, high = float(kept.min()), float(kept.max())
    if axis.get_xscale() == "log":
        axis.set_xlim(low / 1.12, high * 1.12)
    else:
        margin = 0.04 * (high - low) or 0.1 * high or 1.0
        axis.set_xlim(low - margin, high + margin)
    axis.set_ylim(-0.02, 1.02)


def _ticks(axis: Axes, kept: np.ndarray) -> None:
    """Plain numbers on a logarithmic axis, 1, 2 and 5 of each decade."""
    if axis.get_xscale() != "log":
        return
    low, high = axis.get_xlim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [
        step * 10.0**decade for decade in decades for step in (1, 2, 5) if low <= step * 10.0**decade <= high
    ]
    axis.set_xticks(ticks, [f"{tick:,.12g}" for tick in ticks])
    axis.minorticks_off()


def _draw_full(axis: Axes, rows: pl.DataFrame) -> None:
    for row in rows.filter(pl.col("policy") == FULL).iter_rows(named=True):
        axis.axhline(row["accuracy"], color="#555555", linewidth=1.2, zorder=2)
        if known(row["low"]):
            axis.axhspan(row["low"], row["high"], facecolor="#999999", alpha=0.16, linewidth=0, zorder=1)
        at = axis.get_xlim()[0]
        axis.annotate(
            "full cache",
            (at, row["accuracy"]),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )


End = tuple[str, float, float, str, Any]


def _draw_policies(axis: Axes, policies: pl.DataFrame) -> list[End]:
    """The lines; returns name, last point, colour and coordinates of those to be named."""
    from matplotlib.transforms import ScaledTranslation

    ends = []
    place, drawn = 0, 0
    n_labelled = policies.filter("labelled").select(NAME).n_unique()
    for (policy, parameters, positions), line in policies.group_by(*NAME, maintain_order=True):
        x, y = line["kept_mean"].to_numpy(), line["accuracy"].to_numpy()
        if not line["labelled"][0]:
            axis.plot(x, y, color=REST, linewidth=0.8, marker=".", markersize=3, zorder=2)
            continue
        if policy in LANDMARKS and parameters == "":
            colour, marker, dash = LANDMARKS[str(policy)]
        else:
            colour, marker = POLICIES[place % len(POLICIES)]
            dash = "-" if place < len(POLICIES) else ":"
            place += 1
        # Side by side, or the bars of one budget would hide each other.
        aside = (drawn - (n_labelled - 1) / 2) * BAR_POINTS / 72
        moved = axis.transData + ScaledTranslation(aside, 0, axis.figure.dpi_scale_trans)
        drawn += 1
        low, high = (line[name].fill_null(math.nan).to_numpy() for name in ("low", "high"))
        axis.vlines(x, low, high, color=colour, linewidth=0.9, alpha=0.6, zorder=3, transform=moved)
        axis.plot(
            x,
            y,
            color=colour,
            linestyle=dash,
            linewidth=1.4,
            marker=marker,
            markersize=9 if marker == "*" else 5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            zorder=4,
            transform=moved,
        )
        name = policy_name(str(policy), str(parameters), str(positions))
        ends.append((name, float(x[-1]), float(y[-1]), colour, moved))
    return ends


def _name_lines(axis: Axes, ends: list[End]) -> None:
    """Names in the right margin, each at the height of its line's end, moved apart where they would overlap."""
    ends = sorted(ends, key=lambda end: (end[2], end[0]))
    for (name, x, y, colour, place), height in zip(
        ends, spread([end[2] for end in ends], 0.047, 0.0, 1.0), strict=True
    ):
        short = name if len(name) <= 28 else name[:27] + "…"
        axis.annotate(
            short,
            (x, y),
            xycoords=place,
            xytext=(1.035, (height + 0.02) / 1.04),  # the limits of the axis are -.02 and 1.02
            textcoords="axes fraction",
            fontsize=8,
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.6,
                "relpos": (0, 0.5),
            },
        )


def spread(heights: list[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending heights moved apart to at least `gap` within the bounds, with the least squares of the moves.

    Where they do not fit, they stand evenly from `low` to `high`.
    """
    from scipy.optimize import isotonic_regression

    room = high - low - gap * (len(heights) - 1)
    if not heights or room < 0:
        return [float(height) for height in np.linspace(low, high, len(heights))]
    steps = gap * np.arange(len(heights))
    placed = np.clip(isotonic_regression(np.array(heights) - steps).x, low, low + room) + steps
    return [float(height) for height in placed]


def _legend(figure: Figure, rows: pl.DataFrame) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    policies = rows.filter(pl.col("policy") != FULL)
    level = rows["level"].fill_nan(None).drop_nulls()
    told = f"{100 * level[0]:.0f} % interval" if len(level) else "interval"
    handles.append(Line2D([], [], color="#555555", linestyle="none", marker="|", markersize=11, label=told))
    if rows.filter(pl.col("policy") == FULL).height:
        handles.append(Patch(color="#999999", alpha=0.35, linewidth=0, label=f"{told}, full cache"))
    rest = policies.filter(~pl.col("labelled")).select(NAME).n_unique()
    if rest:
        words = "further policy" if rest == 1 else "further policies"
        handles.append(Line2D([], [], color=REST, marker=".", label=f"{rest} {words} (see table)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
