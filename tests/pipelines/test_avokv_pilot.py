"""AvoKV-E's pilot: the pick by hand, and a small one of the built-in model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cfkv import store
from cfkv.config import Execution, OnlineConfig, Recipe, TraceConfig
from cfkv.errors import CfkvError
from cfkv.schemas import EVALUATIONS
from cfkv.session import Session
from pipelines.avokv_pilot.page import page
from pipelines.avokv_pilot.pilot import Sweep, build, pick, remarks


def sweep(folder: Path, **changes: Any) -> Sweep:
    given = {
        "pilot": folder / "pilot",
        "test": folder / "test",
        "budgets": ("40%",),
        "every": 16,
        "weights": (0.0, 0.05),
        "delays": (4, 8),
        "max_new_tokens": 24,
    }
    return Sweep(**{**given, **changes})


def test_settings_are_policies_that_say_what_differs() -> None:
    found = sweep(Path())
    assert found.default == "avokv_e:every=16"
    assert found.other == "r_kv:every=16"
    assert found.settings == {
        (0.0, 4): "avokv_e:delay=4;every=16;payload_weight=0.0",
        (0.0, 8): "avokv_e:delay=8;every=16;payload_weight=0.0",
        (0.05, 4): "avokv_e:delay=4;every=16",
        (0.05, 8): "avokv_e:delay=8;every=16",
    }


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ([1, 2, 3, 4], (0.05, 8)),
        ([1, 3, 3, 2], (0.0, 8)),
        ([2, 2, 2, 2], (0.0, 4)),
        ([1, 1, 3, 3], (0.05, 4)),
    ],
)
def test_ties_go_to_the_smaller_weight_then_the_smaller_delay(
    right: list[int], expected: tuple[float, int]
) -> None:
    found = sweep(Path())
    rows = {text: {"right": count} for text, count in zip(found.settings.values(), right, strict=True)}
    assert pick(found, rows) == expected


def test_remarks_by_hand() -> None:
    better = {"difference": 0.3, "adjusted_pvalue": 0.01}
    best = {"against_default": better, "against_random": better, "failed": 0, "rows": 9}
    assert remarks(best) == []
    assert remarks({**best, "against_default": {**better, "adjusted_pvalue": 0.31}, "failed": 2}) == [
        "The pick is not significantly better than default on the pilot (+0.300, adjusted p 0.31).",
        "The pick fails on 2 of 9 rows, which count as wrong.",
    ]
    assert "random on the pilot (no shared rows)" in remarks({**best, "against_random": None})[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pilot")
    for name, seed, limit in (("pilot", 1, 4), ("test", 2, 3), ("same", 1, 2)):
        recipe = Recipe(
            trace=TraceConfig(limit=limit, part_size=2, max_new_tokens=384, seed=seed),
            online=OnlineConfig(draws=100),
        )
        Session.open(folder / name, recipe, Execution(device="cpu")).trace()
    return folder


def test_a_small_pilot(folder: Path) -> None:
    """Counts are those of the runs' own rows, and the pick is judged on the other run."""
    content = build(sweep(folder))
    (found,) = content["budgets"]
    rows = store.collect(folder / "pilot", EVALUATIONS)
    for each in found["settings"]:
        weight = "" if each["weight"] else ";payload_weight=0.0"
        own = rows.filter(parameters=f"delay={each['delay']};every=16{weight}")
        assert (each["right"], each["rows"]) == (own["correct"].sum(), own.height)
    best = max(each["right"] for each in found["settings"])
    chosen = next(each for each in found["settings"] if each["right"] == best)
    assert (found["pick"]["weight"], found["pick"]["delay"]) == (chosen["weight"], chosen["delay"])
    assert found["remarks"]  # four traces prove nothing
    assert [row["called"] for row in found["test"]] == ["pick", "default", "r_kv", "random", "full cache"]
    tested = store.collect(folder / "test", EVALUATIONS)
    assert found["test"][-1]["right"] == tested.filter(policy="full")["correct"].sum() > 0
    assert found["test"][0]["against_default"]["difference"] == pytest.approx(
        found["test"][0]["accuracy"] - found["test"][1]["accuracy"], abs=1e-3
    )
    text = page(json.loads(json.dumps(content)))
    assert "| weight | delay 4 | delay 8 |" in text
    assert f"**{best}**" in text
    assert "not significantly better than default on the pilot" in text
    assert str(folder) not in text + json.dumps(content)
    assert build(sweep(folder)) == content  # nothing is left to run


def test_the_test_run_must_have_other_problems(folder: Path) -> None:
    message = "2 of 2 problems of .*same are problems of .*pilot too.*settings of one run must be judged on"
    with pytest.raises(CfkvError, match=message):
        build(sweep(folder, test=folder / "same"))
