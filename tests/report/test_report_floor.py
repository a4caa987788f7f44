"""The noise floor that the null kind measures, beside the other kinds."""

from __future__ import annotations

from typing import Any

import polars as pl
from report_frames import frame, window

from cfkv.analysis.floor import (
    count_removals_under_floor,
    count_under_floor,
    floor_facts,
    recorded_dtype,
)
from cfkv.schemas import EVICTION_KL, WINDOWS


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
    assert count_under_floor(windows.with_columns(flipped=pl.lit(True)), "occlusion", flipped=True) == (3, 5)


def removal(kl: float | None, null_kl: float | None, **changes: Any) -> dict[str, Any]:
    row = {"trace_id": "t1", "kind": "eviction_kl", "scope": "all", "step": 8, "block_index": 0, "kl": kl}
    return row | {"null_kl": null_kl, "blocks": [{"start": 2, "stop": 3}]} | changes


def test_removals_under_the_floor_by_hand() -> None:
    """.5 is above the floor .1, .1 is at it, 0 is within; a row without a floor is not held against one."""
    rows = frame(EVICTION_KL, [removal(0.5, 0.1), removal(0.1, 0.1), removal(0.0, 0.1), removal(0.0, None)])
    assert count_removals_under_floor(rows, "eviction_kl") == (2, 3)
    assert count_removals_under_floor(rows.tail(1), "eviction_kl") is None
    assert floor_facts("eviction_kl", frame(WINDOWS, []), rows, {}) == [
        ("removals whose KL is at most the null KL of their checkpoint", "2 of 3")
    ]
    assert floor_facts("eviction_kl", frame(WINDOWS, []), rows.tail(1), {}) == [
        ("noise floor", "unknown: no row has a null_kl")
    ]


def test_a_missing_floor_is_said_with_the_command_that_makes_it() -> None:
    facts = floor_facts(
        "occlusion", frame(WINDOWS, [window(1, 0)]), frame(EVICTION_KL, []), {"window": 8, "stride": 4}
    )
    assert facts == [
        (
            "noise floor",
            "unknown: no null windows; `cfkv label DIR --kind null --window 8 --stride 4` measures it",
        ),
        ("windows decided by a margin below 1e-4 (float32)", "0 of 1"),
    ]


def test_flips_of_the_null_kind_are_told_not_hidden() -> None:
    """Trace 1: two null windows, one flipped, the larger |delta| .2; so the flipped window of .1 is within it.

    Trace 2 has no null window: its one window has no floor. One of the three was decided by a margin of 1e-5.
    """
    rows = [
        window(1, 0, kind="null", delta_nll=-0.2, flipped=True),
        window(1, 1, kind="null", delta_nll=0.0),
        window(1, 0, delta_nll=0.1, flipped=True, min_margin=1e-5),
        window(1, 1, delta_nll=0.5, flipped=True),
        window(2, 0, delta_nll=0.1),
    ]
    windows, none = frame(WINDOWS, rows), frame(EVICTION_KL, [])
    assert floor_facts("occlusion", windows, none, {}) == [
        ("windows whose Δnll is within the null floor of their trace", "1 of 2"),
        ("flipped windows among those with a floor that are within it", "1 of 2"),
        ("windows without a floor (no null window or no Δnll)", "1"),
        ("null windows that flipped by rounding alone", "1 of 2"),
        ("windows decided by a margin below 1e-4 (float32)", "1 of 3"),
    ]
    assert floor_facts("null", windows, none, {}) == [
        ("null windows that flipped by rounding alone", "1 of 2"),
        ("largest |Δnll| of a null window, nats/token", "2.0e-01"),
        ("windows decided by a margin below 1e-4 (float32)", "0 of 2"),
    ]


def test_what_margin_is_narrow_depends_on_the_dtype() -> None:
    """Two spacings of a bfloat16 logit between 16 and 32 are 0.25: narrow there, and wide in float32."""
    rows = frame(WINDOWS, [window(1, 0, min_margin=0.25), window(1, 1, min_margin=1.0)])
    none = frame(EVICTION_KL, [])
    stages = {"label:occlusion": {"identity": {"config": {"model": {"dtype": "bfloat16"}}}}}
    told = {
        dtype: floor_facts("occlusion", rows, none, {}, dtype=dtype)[-1]
        for dtype in (recorded_dtype(stages, "occlusion"), recorded_dtype({}, "occlusion"))
    }
    assert told == {
        "bfloat16": ("windows decided by a margin below 0.5 (bfloat16)", "1 of 2"),
        "float32": ("windows decided by a margin below 1e-4 (float32)", "0 of 2"),
    }
