"""Rows of the table evaluations, built by hand."""

import polars as pl
import pyarrow as pa

from cfkv.schemas import EVALUATIONS


def row(trace, policy, budget, *, correct, **changes):
    """One row; slots is the budget in tokens, if it is one."""
    mode, parameters = changes.get("mode", "forced"), changes.get("parameters", "")
    failed = "status" in changes
    made = {
        "trace_id": f"t{trace:03}" if isinstance(trace, int) else trace,
        "problem_id": f"p{trace:03}" if isinstance(trace, int) else trace,
        "arm": f"{mode},{policy}{':' * bool(parameters)}{parameters},{budget}",
        "policy": policy,
        "parameters": parameters,
        "budget": budget,
        "slots": int(budget) if budget.isdigit() else None,
        "mode": mode,
        "positions": "absolute",
        "sample_index": 0,
        "eviction": "none" if policy == "full" else "physical",
        "answer": None if failed else "1",
        "correct": correct,
        "answered": None if failed else True,
        "verdict": None if failed else "correct" if correct else "wrong",
        "finish_reason": None if failed else "boxed",
        "n_read": None if failed else 100,
        "n_tokens": None if failed else 10,
        "n_steps": None if failed else 50,
        "kept_mean": None if failed else 40.0,
        "kept_peak": None if failed else 64.0,
        "evictions": None if failed else 30,
        "evicted": None if failed else 46.0,
        "min_margin": None if failed else 0.5,
        "seconds": None if failed else 2.0,
        "peak_bytes": None if failed else 4096,
        "token_ids": None if failed else [1, 2],
        "status": "ok",
        "reason": None,
    }
    return {**made, **changes}


def arm(policy, budget, outcomes, **changes):
    """One row per outcome: 1 right, 0 wrong, None failed; traces t000, t001, ..., a problem each."""
    rows = []
    for trace, outcome in enumerate(outcomes):
        extra = {} if outcome is not None else {"status": "out_of_memory", "reason": "out of memory"}
        rows.append(
            row(trace, policy, budget, correct=None if outcome is None else bool(outcome), **extra, **changes)
        )
    return rows


def table(*parts):
    """The rows of all parts as the table evaluations."""
    rows = [entry for part in parts for entry in part]
    return pl.DataFrame(pl.from_arrow(pa.Table.from_pylist(rows, schema=EVALUATIONS.schema)))
