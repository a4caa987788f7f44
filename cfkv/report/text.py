"""How numbers, layers and reasons are written in figures and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable

SIGNIFICANCE = 0.05
MEASURES = {
    "spearman_within": "within-trace ρ",
    "spearman_pooled": "pooled ρ",
    "auroc": "AUROC",
    "spearman_value_within": "within-trace value ρ",
}
NULL_VALUE = {"spearman_within": 0.0, "spearman_pooled": 0.0, "auroc": 0.5, "spearman_value_within": 0.0}


def known(value: float | None) -> bool:
    """Whether `value` is a number: neither null nor NaN."""
    return value is not None and not math.isnan(value)


def significant(adjusted_pvalue: float | None) -> bool:
    """Whether an adjusted p-value is below 5 %."""
    return adjusted_pvalue is not None and adjusted_pvalue < SIGNIFICANCE


def number(value: float | None, digits: int = 3) -> str:
    """A fixed number of decimals with a true minus sign; an en dash where there is no number."""
    if value is None or math.isnan(value):
        return "–"
    written = f"{value:.{digits}f}"
    return f"{0:.{digits}f}" if float(written) == 0 else written.replace("-", "−")


def pvalue(value: float | None) -> str:
    """A p-value with enough decimals to see on which side of 5 % it lies."""
    if value is None or math.isnan(value):
        return "–"
    if value < 0.001:
        return "< 0.001"
    return f"{value:.4f}" if 0.045 < value < 0.055 else f"{value:.3f}"


def percent(part: float, whole: float) -> str:
    """`part` of `whole` in per cent; an en dash where the whole is empty."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def count(value: int) -> str:
    """An integer with thousands separated by commas."""
    return f"{value:,}"


def layer_name(layer: int | None) -> str:
    """A block's number, `emb` for the embedding output, an en dash for signals without layers."""
    if layer is None:
        return "–"
    return "emb" if layer == -1 else str(layer)


def span(values: Iterable[int | None]) -> str:
    """`60`, or `58–60` where the values differ."""
    found = sorted({value for value in values if value is not None})
    if not found:
        return "0"
    return count(found[0]) if len(found) == 1 else f"{count(found[0])}–{count(found[-1])}"


def slug(name: str) -> str:
    """`name` as part of a file name or an HTML id."""
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
