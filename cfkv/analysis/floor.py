"""The noise floor: labels that are no larger than what arithmetic does when nothing is removed.

Windows have the `null` kind: the largest |delta_nll| of a trace's null windows is that trace's floor. Rows of
eviction_kl carry their own, the KL of the same replay with nothing removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from cfkv.margins import margin_text, narrow_margin


def count_under_floor(windows: pl.DataFrame, kind: str, *, flipped: bool = False) -> tuple[int, int] | None:
    """Windows of a kind that move the answer no more than rounding does, and windows that have a floor.

    The floor of a trace is the largest |delta_nll| of its `null` windows. With `flipped`, only windows that changed
    the answer are counted: these are the labels. None without a null kind, or for it.
    """
    good = windows.filter(pl.col("status") == "ok", pl.col("delta_nll").is_finite())
    floors = (
        good.filter(pl.col("kind") == "null").group_by("trace_id").agg(floor=pl.col("delta_nll").abs().max())
    )
    held = good.filter(pl.col("kind") == kind).join(floors, on="trace_id")
    if kind == "null" or held.is_empty():
        return None
    if flipped:
        held = held.filter(pl.col("flipped"))
    return held.filter(pl.col("delta_nll").abs() <= pl.col("floor")).height, held.height


def count_removals_under_floor(eviction_kl: pl.DataFrame, kind: str) -> tuple[int, int] | None:
    """Removals of a kind whose KL is at most that of their checkpoint with nothing removed, and those with a floor."""
    held = eviction_kl.filter(pl.col("kind") == kind, pl.col("kl").is_finite(), pl.col("null_kl").is_finite())
    return (held.filter(pl.col("kl") <= pl.col("null_kl")).height, held.height) if held.height else None


def count_flips(windows: pl.DataFrame, kind: str) -> tuple[int, int]:
    """Windows of a kind that changed the answer, and windows that were replayed."""
    good = windows.filter(pl.col("kind") == kind, pl.col("status") == "ok")
    return good.filter(pl.col("flipped")).height, good.height


def count_narrow(windows: pl.DataFrame, kind: str, dtype: str) -> tuple[int, int]:
    """Windows of a kind in which some token was decoded by a margin that is narrow for the compute dtype, and windows
    that were replayed."""
    good = windows.filter(pl.col("kind") == kind, pl.col("status") == "ok")
    return good.filter(pl.col("min_margin") < narrow_margin(dtype)).height, good.height


def null_command(run: str, settings: Mapping[str, Any]) -> str:
    """The command that measures the floor of windows made with `settings` (a kind's recorded configuration)."""
    flags = "".join(
        f" --{name} {settings[name]}" for name in ("window", "stride") if settings.get(name) is not None
    )
    return f"cfkv label {run} --kind null{flags}"


def floor_facts(
    kind: str,
    windows: pl.DataFrame,
    eviction_kl: pl.DataFrame,
    settings: Mapping[str, Any],
    run: str = "DIR",
    dtype: str = "float32",
) -> list[tuple[str, str]]:
    """What is known of one kind's noise, as pairs of name and text; what is not known is said, with the way to it.

    Parameters
    ----------
    kind : str
    windows, eviction_kl : DataFrame
        The tables of those names, all kinds in them.
    settings : mapping
        The kind's recorded configuration.
    run : str
        The run directory, as it stands in the command that is offered.
    dtype : str
        The model's compute dtype (`recorded_dtype`), which says what margin is narrow.
    """
    facts: list[tuple[str, str]] = []
    if (eviction_kl["kind"] == kind).any():
        under = count_removals_under_floor(eviction_kl, kind)
        facts.append(
            ("removals whose KL is at most the null KL of their checkpoint", _of(under))
            if under
            else ("noise floor", "unknown: no row has a null_kl")
        )
    if not (windows["kind"] == kind).any():
        return facts
    if kind == "null":
        facts.append(("null windows that flipped by rounding alone", _of(count_flips(windows, kind))))
        largest = windows.filter(pl.col("kind") == kind)["delta_nll"].abs().fill_nan(None).max()
        facts.append(("largest |Δnll| of a null window, nats/token", _size(largest)))
    elif (under := count_under_floor(windows, kind)) is None:
        facts.append(
            ("noise floor", f"unknown: no null windows; `{null_command(run, settings)}` measures it")
        )
    else:
        labels = count_under_floor(windows, kind, flipped=True)
        facts.append(("windows whose Δnll is within the null floor of their trace", _of(under)))
        facts.append(("flipped windows among those with a floor that are within it", _of(labels or (0, 0))))
        if (bare := count_flips(windows, kind)[1] - under[1]) > 0:
            facts.append(("windows without a floor (no null window or no Δnll)", f"{bare:,}"))
        null = count_flips(windows, "null")
        facts.append(("null windows that flipped by rounding alone", _of(null)))
    narrow = _of(count_narrow(windows, kind, dtype))
    facts.append((f"windows decided by a margin below {margin_text(dtype)} ({dtype})", narrow))
    return facts


def recorded_dtype(stages: Mapping[str, Any], kind: str) -> str:
    """The compute dtype that run.json has for a label kind; float32 where it says none."""
    try:
        return str(stages[f"label:{kind}"]["identity"]["config"]["model"]["dtype"])
    except (KeyError, TypeError):
        return "float32"


def _of(pair: tuple[int, int]) -> str:
    return f"{pair[0]:,} of {pair[1]:,}"


def _size(value: Any) -> str:
    if not isinstance(value, float | int):
        return "none"
    return f"{value:.1e}" if value else "0"
