"""The look shared by the figures; matplotlib is imported when one is drawn."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with any colour vision; marker and dash repeat the distinction.
LINES: dict[str, tuple[str, Any, Any]] = {
    "raw": ("#0072B2", "o", "-"),
    "ema": ("#CC79A7", "^", "-."),
    "rolling_mean": ("#009E73", "s", "--"),
    "rolling_z": ("#D55E00", "D", "-"),
}
OTHER_LINE: tuple[str, Any, Any] = ("#555555", "v", ":")
_SETTINGS: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.unicode_minus": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "cfkv",
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}


def styled() -> AbstractContextManager[None]:
    """The project's matplotlib settings, for the length of a `with` block."""
    import matplotlib

    return matplotlib.rc_context(_SETTINGS)


def empty_figure(sentence: str) -> Figure:
    """A small figure that says why there is nothing to draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1.2))
    figure.text(0.5, 0.5, sentence, ha="center", va="center", fontsize=9)
    return figure
