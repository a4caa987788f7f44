"""The sweep of AvoKV-E's settings on one run, the pick, and its test on another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from cfkv import __version__, store
from cfkv.analysis.compare import RANDOM, SIGNIFICANCE, policy_accuracy, policy_comparisons
from cfkv.config import Execution
from cfkv.errors import CfkvError
from cfkv.evaluation._names import parse_policy, policy_text
from cfkv.evaluation._split import OtherProblems
from cfkv.manifest import Manifest
from cfkv.policies._base import make_policy
from cfkv.schemas import EVALUATIONS
from cfkv.session import Session
from cfkv.stage import Run

# The paper's lambda_b and W_delay; its choices are .05, and 8 from a budget of 768 on, else 32.
WEIGHTS = (0.0, 0.025, 0.05, 0.1, 0.2)
DELAYS = (0, 4, 8, 16, 32)
AVOKV, OTHER, DEFAULT, FULL = "avokv_e", "r_kv", "default", "full"
KEY = ("policy", "parameters")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is swept, and where; `max_new_tokens` None: as the runs say."""

    pilot: Path
    test: Path
    budgets: tuple[str, ...]
    every: int
    weights: tuple[float, ...] = WEIGHTS
    delays: tuple[int, ...] = DELAYS
    max_new_tokens: int | None = None
    batch_size: int = 16
    device: str = "cpu"

    @property
    def settings(self) -> dict[tuple[float, int], str]:
        """Text of the policy by weight and delay, in the order in which ties are broken."""
        return {
            (weight, delay): self._text(AVOKV, payload_weight=weight, delay=delay)
            for weight in sorted(set(self.weights))
            for delay in sorted(set(self.delays))
        }

    @property
    def default(self) -> str:
        """AvoKV-E as it is published, but for the tokens between evictions."""
        return self._text(AVOKV)

    @property
    def other(self) -> str:
        """R-KV, its nearest relative, at the same steps."""
        return self._text(OTHER)

    def _text(self, name: str, **options: Any) -> str:
        return policy_text(make_policy(name, {"every": self.every, **options}))


def build(sweep: Sweep) -> dict[str, Any]:
    """Everything that is written to the JSON file.

    Raises
    ------
    CfkvError
        If the runs share a problem, or lack traces.
    """
    OtherProblems(Run(sweep.test), [str(sweep.pilot)], "settings").check()
    swept = evaluated(sweep, sweep.pilot, [sweep.default, *sweep.settings.values()], sweep.budgets)
    budgets = []
    for budget in sweep.budgets:
        found = judged(swept, budget, [sweep.default, *sweep.settings.values()], sweep.default)
        best = pick(sweep, found)
        chosen = sweep.settings[best]
        tested = evaluated(sweep, sweep.test, [chosen, sweep.default, sweep.other], (budget,))
        budgets.append(
            {
                "budget": budget,
                "settings": [
                    {"weight": weight, "delay": delay, **found[text]}
                    for (weight, delay), text in sweep.settings.items()
                ],
                "default": found[sweep.default],
                "pick": {"weight": best[0], "delay": best[1], "policy": chosen},
                "remarks": remarks(found[chosen]),
                "test": [
                    {"policy": text, "called": called, **row}
                    for text, called, row in _lines(
                        sweep, chosen, judged(tested, budget, None, sweep.default)
                    )
                ],
            }
        )
    return {
        "command": f"python -m pipelines.avokv_pilot PILOT TEST --budgets {','.join(sweep.budgets)} "
        f"--every {sweep.every}",
        "pilot": sweep.pilot.resolve().name,
        "test": sweep.test.resolve().name,
        "cfkv": __version__,
        "every": sweep.every,
        "budgets": budgets,
    }


def evaluated(sweep: Sweep, run: Path, policies: Sequence[str], budgets: Sequence[str]) -> pl.DataFrame:
    """Rows of these policies, of random and of the full cache, at these budgets; made or found in the run."""
    recipe = Manifest(run).recipe()
    changes: dict[str, Any] = {"policies": tuple(dict.fromkeys(policies)), "budgets": tuple(budgets)}
    changes |= {"mode": "forced", "positions": "absolute"}
    if sweep.max_new_tokens is not None:
        changes["max_new_tokens"] = sweep.max_new_tokens
    online = recipe.online.model_copy(update=changes)
    execution = Execution(device=sweep.device, batch_size=sweep.batch_size)
    session = Session.open(run, recipe.model_copy(update={"online": online}), execution)
    session.evaluate_online()
    session.compare()
    names = [parse_policy(text)[0] + ":" + text.partition(":")[2] for text in (*policies, RANDOM, FULL)]
    named = pl.concat_str(*KEY, separator=":").is_in(names)
    rows = store.collect(run, EVALUATIONS).filter(
        named & (pl.col("mode") == "forced") & (pl.col("positions") == "absolute")
    )
    if not rows.height:
        raise CfkvError(f"{run} has no correct trace; make more of them")
    return rows


def judged(
    rows: pl.DataFrame, budget: str, policies: Sequence[str] | None, default: str
) -> dict[str, dict[str, Any]]:
    """Accuracy of every policy at a budget, and its difference to random and to the default, by its text.

    `share` is the share of right answers of all rows, failed ones included: a setting that cannot run on a trace is no
    better for it. p-values are adjusted (Holm) over all policies here.
    """
    here = rows.filter(pl.col("budget").is_in([budget, "all"]))
    accuracy = {_text(row): row for row in policy_accuracy(here).iter_rows(named=True)}
    plain = pl.col("parameters") == default.partition(":")[2]
    calling = pl.when((pl.col("policy") == AVOKV) & plain).then(pl.lit(DEFAULT)).otherwise(pl.col("policy"))
    compared = policy_comparisons(here.with_columns(policy=calling), against=(RANDOM, DEFAULT))
    against = {(_text(row), row["against"]): row for row in compared.iter_rows(named=True)}
    found = {}
    for text in policies or sorted(accuracy):
        row = accuracy[text]
        right = round(row["accuracy"] * row["n_graded"]) if row["n_graded"] else 0
        own = DEFAULT + ":" + default.partition(":")[2] if text == default else text
        found[text] = {
            "share": right / row["n_rows"],
            "right": right,
            "rows": row["n_rows"],
            "failed": row["n_failed"],
            **{name: _number(row[name]) for name in ("accuracy", "low", "high", "kept_mean")},
            **{f"against_{name}": _difference(against.get((own, name))) for name in (RANDOM, DEFAULT)},
        }
    return found


def _text(row: Mapping[str, Any]) -> str:
    return row["policy"] + (f":{row['parameters']}" if row["parameters"] else "")


def _number(value: float | None) -> float | None:
    return None if value is None or np.isnan(value) else round(float(value), 4)


def _difference(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The difference with its adjusted p; None where there is nothing to compare with."""
    if row is None or not row["n_items"]:
        return None
    names = ("difference", "low", "high", "adjusted_pvalue")
    return {**{name: _number(row[name]) for name in names}, "wins": row["wins"], "losses": row["losses"]}


def pick(sweep: Sweep, found: Mapping[str, Mapping[str, Any]]) -> tuple[float, int]:
    """Weight and delay with the largest share of right answers; ties: the smaller weight, then the smaller delay."""
    return max(sweep.settings, key=lambda each: (found[sweep.settings[each]]["right"], -each[0], -each[1]))


def significant(difference: Mapping[str, Any] | None) -> bool:
    """Whether it is better, after adjustment."""
    p = None if difference is None else difference["adjusted_pvalue"]
    return p is not None and p < SIGNIFICANCE and difference is not None and difference["difference"] > 0


def remarks(best: Mapping[str, Any]) -> list[str]:
    """What should keep a reader from believing the pick."""
    said = []
    for name in (DEFAULT, RANDOM):
        difference = best[f"against_{name}"]
        if not significant(difference):
            said.append(
                f"The pick is not significantly better than {name} on the pilot ({shown(difference)})."
            )
    if best["failed"]:
        said.append(f"The pick fails on {best['failed']} of {best['rows']} rows, which count as wrong.")
    return said


def shown(difference: Mapping[str, Any] | None) -> str:
    """`+.02, adjusted p .31`."""
    if difference is None:
        return "no shared rows"
    p = difference["adjusted_pvalue"]
    return f"{difference['difference']:+.3f}, " + ("no test" if p is None else f"adjusted p {p:.2g}")


def _lines(
    sweep: Sweep, chosen: str, found: Mapping[str, dict[str, Any]]
) -> list[tuple[str, str, dict[str, Any]]]:
    calls = {chosen: "pick", sweep.default: "default", sweep.other: OTHER, RANDOM: RANDOM, FULL: "full cache"}
    return [(text, called, found[text]) for text, called in calls.items() if text in found]
