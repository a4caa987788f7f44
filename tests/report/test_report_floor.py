"""The noise floor that the null kind measures, beside the other kinds."""

from __future__ import annotations

import polars as pl

from cfkv.report.counts import count_under_floor


def test_windows_under_the_floor_by_hand() -> None:
    """Trace a has null values .01 and -.03: its floor is .03, and .02 and -.03 are within it, .5 is not.

    Trace b has the floor 0 and one window of exactly 0; trace c has no null window, so no floor; a failed window
    counts nowhere. Within: 2 of a and 1 of b; with a floor: 3 of a and 2 of b.
    """
    rows = [
        *[("a", "null", 0.01, "ok"), ("a", "null", -0.03, "ok"), ("b", "null", 0.0, "ok")],
        *[("a", "occlusion", 0.02, "ok"), ("a", "occlusion", -0.03, "ok"), ("a", "occlusion", 0.5, "ok")],
        *[("b", "occlusion", 0.0, "ok"), ("b", "occlusion", 0.001, "ok"), ("c", "occlusion", 0.0, "ok")],
        ("a", "occlusion", None, "out_of_memory"),
    ]
    windows = pl.DataFrame(rows, schema=["trace_id", "kind", "delta_nll", "status"], orient="row")
    assert count_under_floor(windows, "occlusion") == (3, 5)
    assert count_under_floor(windows, "null") is None
    assert count_under_floor(windows.filter(kind="occlusion"), "occlusion") is None
