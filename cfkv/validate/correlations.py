"""Checks of the correlations table."""

from __future__ import annotations

import math

from cfkv.schemas import CORRELATIONS
from cfkv.validate._check import Check
from cfkv.validate._content import Content


def estimates(content: Content) -> Check:
    """An estimate lies in its interval, or there is none and a reason."""
    check = Check("correlations", "an estimate lies in its interval, or has a reason why there is none")
    columns = ("estimate", "low", "high")
    for row in content.frame(CORRELATIONS).drop_nulls(columns).to_dicts():
        check.seen += 1
        numbers = [row[name] for name in columns]
        where = ", ".join(
            f"{name} {row[name]}" for name in ("kind", "signal", "layer", "smoothing", "measure")
        )
        seen = ", ".join(f"{name} {row[name]:.4g}" for name in columns)
        if any(map(math.isnan, numbers)):
            if not row["nan_reason"]:
                check.fail(where, f"{seen}, no reason", "a nan_reason")
        elif not row["low"] - 1e-9 <= row["estimate"] <= row["high"] + 1e-9:
            check.fail(where, seen, "low <= estimate <= high")
    return check
