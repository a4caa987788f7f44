"""The page of a study by hand: order, marks, missing figures."""

from __future__ import annotations

from typing import Any

from pipelines.policy_study.page import page


def cell(accuracy: float | None, **changes: Any) -> dict[str, Any]:
    made = {"accuracy": accuracy, "low": 0.1, "high": 0.9, "n_graded": 10, "n_failed": 0}
    return made | changes


def compared(difference: float, adjusted: float | None) -> dict[str, Any]:
    return {"difference": difference, "adjusted_pvalue": adjusted}


def entry(policy: str, **budgets: Any) -> dict[str, Any]:
    return {"policy": policy, "parameters": "", "acts": "every step", "budgets": budgets}


CONTENT: dict[str, Any] = {
    "model": "m",
    "weights": "float32",
    "dataset": "d",
    "n_traces": 10,
    "n_correct": 9,
    "kind": "knockout",
    "budgets": ["8", "16"],
    "accuracy": [
        entry("full", all=cell(1.0)),
        entry("tova", **{"8": cell(None, n_failed=9), "16": cell(0.5)}),
        entry(
            "h2o",
            **{
                "8": cell(0.25, against_random=compared(0.2, 0.01), against_full=compared(-0.75, 0.001)),
                "16": cell(0.5, against_random=compared(0.1, 0.4), against_full=compared(-0.5, None)),
            },
        ),
    ],
    "validity": [
        {"policy": "tova", "measures": {"auroc": {"estimate": 0.4, "low": 0.3, "high": 0.5}}},
        {
            "policy": "h2o",
            "measures": {
                "auroc": {"estimate": 0.75, "low": 0.7, "high": 0.8},
                "auroc - random": {"estimate": 0.25, "adjusted_pvalue": 0.01},
                "rho": {"estimate": None},
            },
        },
    ],
    "carryover": [
        {
            "measure": "knockout end auroc",
            "budget": "16",
            "policies": "without_excluded",
            **{"estimate": 0.5, "low": 0.2, "high": 0.7, "adjusted_pvalue": 0.01, "n_policies": 12},
        },
        {"measure": "knockout end auroc", "budget": "16", "policies": "all", "estimate": 0.9},
    ],
}


def test_page_by_hand() -> None:
    lines = page(CONTENT).splitlines()
    assert "| full | never | 1.00 [0.10, 0.90] |  |" in lines
    best, other = (
        next(n for n, line in enumerate(lines) if line.startswith(f"| `{policy}` | every step"))
        for policy in ("h2o", "tova")
    )
    assert best < other
    assert lines[best] == "| `h2o` | every step | 0.25 [0.10, 0.90] +< | 0.50 [0.10, 0.90] ~ |"
    assert lines[other] == "| `tova` | every step | – (9 failed) | 0.50 [0.10, 0.90] |"
    assert "| `h2o` | – | 0.75 [0.70, 0.80]* | – | – | – |" in lines
    assert "| knockout end auroc | – | +0.50* [+0.20, +0.70], n = 12 |" in lines


def test_without_validity() -> None:
    text = page({**CONTENT, "validity": [], "carryover": []})
    assert "Validity" not in text
    assert "carry over" not in text
