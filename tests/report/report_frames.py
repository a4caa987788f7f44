"""Small tables with the columns of cfkv.schemas and values that a reader can count by hand."""

from __future__ import annotations

import math
from typing import Any

import polars as pl
import pyarrow as pa

from cfkv import schemas

TOKENS = ["Q", ":", "<script>", "\n", " 7", " &", " 3", "\n\n", " ", "\ufffd", "</think>", "{", "10", "}"]
PROMPT_LEN, REASONING_STOP, ANSWER_START = 2, 10, 11


def frame(table: schemas.Table, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A table with every declared column; what a row leaves out is null."""
    full = [{name: row.get(name) for name in table.schema.names} for row in rows]
    result = pl.from_arrow(pa.Table.from_pylist(full, schema=table.schema))
    assert isinstance(result, pl.DataFrame)
    return result


def trace(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "trace_id": f"t{number}",
        "dataset": "registers",
        "problem_id": f"p{number}",
        "sample_index": 0,
        "model": "builtin",
        "model_revision": "r1",
        "weights": "float32",
        "token_ids": list(range(100, 100 + len(TOKENS))),
        "token_texts": TOKENS,
        "prompt_len": PROMPT_LEN,
        "reasoning_start": PROMPT_LEN,
        "reasoning_stop": REASONING_STOP,
        "answer_start": ANSWER_START,
        "answer_stop": len(TOKENS),
        "boundary": "think_end",
        "answer_prefix": "",
        "logprobs": [-0.1] * (len(TOKENS) - PROMPT_LEN),
        "output_text": "".join(TOKENS[PROMPT_LEN:]),
        "reference_answer": "10",
        "answer": "10",
        "correct": True,
        "finish_reason": "boxed",
        "status": "ok",
        "reason": "",
    }
    return row | changes


def label(number: int, important: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """`important` are positions; all other reasoning tokens are tested and not important."""
    tested = range(PROMPT_LEN, REASONING_STOP)
    row = {
        "trace_id": f"t{number}",
        "problem_id": f"p{number}",
        "kind": "occlusion",
        "importance": [(int(i in important) if i in tested else -1) for i in range(len(TOKENS))],
        "value": [(0.25 * (i - 3) if i in tested else math.nan) for i in range(len(TOKENS))],
        "control_answer": "10",
        "control_agrees": True,
        "n_windows": 3,
        "n_flipped": 1,
        "status": "labelled",
        "reason": "",
    }
    return row | changes


def window(number: int, index: int, **changes: Any) -> dict[str, Any]:
    row = {
        "trace_id": f"t{number}",
        "kind": "occlusion",
        "scope": "all",
        "window_index": index,
        "start": 2 + 4 * index,
        "stop": 6 + 4 * index,
        "replacement_id": 0,
        "answer": "10",
        "answered": True,
        "flipped": False,
        "delta_nll": 0.1,
        "min_margin": 0.5,
        "accepted_draft": 3,
        "decoded": 0,
        "status": "ok",
        "reason": "",
    }
    return row | changes


def correlation(
    signal: str, layer: int, smoothing: str, measure: str, estimate: float, **changes: Any
) -> dict:
    row = {
        "kind": "occlusion",
        "signal": signal,
        "layer": layer,
        "smoothing": smoothing,
        "control": "none",
        "measure": measure,
        "estimate": estimate,
        "low": estimate - 0.1,
        "high": estimate + 0.1,
        "level": 0.95,
        "pvalue": 0.001,
        "adjusted_pvalue": 0.004,
        "n_traces": 4,
        "n_tokens": 32,
        "n_important": 9,
        "nan_reason": "",
    }
    return row | changes


def correlations(adjusted_pvalue: float = 0.004) -> pl.DataFrame:
    """Two signals, layers -1 to 2, two smoothings, three measures; every adjusted p the same."""
    rows = []
    for offset, signal in ((0.3, "hidden_diff"), (-0.2, "key_norm")):
        for layer in range(-1, 3):
            for smoothing in ("raw", "rolling_z"):
                for measure, null in (("spearman_within", 0.0), ("spearman_pooled", 0.0), ("auroc", 0.5)):
                    estimate = null + offset + 0.01 * layer
                    rows.append(
                        correlation(
                            signal, layer, smoothing, measure, estimate, adjusted_pvalue=adjusted_pvalue
                        )
                    )
    return frame(schemas.CORRELATIONS, rows)


def evaluation(
    number: int, policy: str, budget: str, *, correct: bool | None, **changes: Any
) -> dict[str, Any]:
    """One row of the table evaluations; slots and kept tokens follow from a budget in tokens."""
    slots = int(budget) if budget.isdigit() else None
    row = {
        "trace_id": f"t{number}",
        "problem_id": f"p{number}",
        "arm": f"forced,{policy},{budget}",
        "policy": policy,
        "parameters": "",
        "budget": budget,
        "slots": slots,
        "mode": "forced",
        "positions": "absolute",
        "sample_index": 0,
        "eviction": "none" if policy == "full" else "physical",
        "answer": "10" if correct else "11",
        "correct": correct,
        "answered": True,
        "verdict": "correct" if correct else "wrong",
        "finish_reason": "boxed",
        "n_read": PROMPT_LEN + 8,
        "n_tokens": 2,
        "n_steps": 10,
        "kept_mean": 0.75 * (slots or 400),
        "kept_peak": float(slots or 400),
        "evictions": 3,
        "evicted": 5.0,
        "seconds": 0.5,
        "peak_bytes": 3 << 20,
        "status": "ok",
        "reason": None,
    }
    return row | changes


RIGHT = {  # of 20 traces, by budget: those with the lowest numbers
    "random": {"32": 2, "64": 6, "256": 12},
    "oracle": {"32": 14, "64": 17, "256": 18},
    "h2o": {"32": 10, "64": 15, "256": 17},
    "knorm <b>": {"32": 1, "64": 7, "256": 13},
}


def evaluations() -> pl.DataFrame:
    """Four policies at three budgets and the full cache, twenty traces each; h2o fails on one at 64."""
    rows = [evaluation(number, "full", "all", correct=number < 18) for number in range(20)]
    for policy, budgets in RIGHT.items():
        for budget, right in budgets.items():
            rows += [evaluation(number, policy, budget, correct=number < right) for number in range(20)]
    for row in rows:
        if (row["policy"], row["budget"], row["trace_id"]) == ("h2o", "64", "t19"):
            row |= {"status": "out_of_memory", "reason": "out of <i>memory</i>", "correct": None}
    return frame(schemas.EVALUATIONS, rows)


def tables() -> dict[str, pl.DataFrame]:
    """Seven traces: four labelled, one excluded, one incorrect, one failed."""
    traces = [trace(number) for number in range(1, 6)]
    traces.append(trace(6, correct=False, answer="11"))
    failed = {"status": "too_long", "reason": "2100 tokens > <b>2048</b>", "correct": None, "answer": None}
    traces.append(trace(7, **failed, problem_id="p6", sample_index=1))
    labels = [label(1, (4, 5)), label(2, (6,)), label(3, (3, 4, 5, 6)), label(4, (8, 9))]
    labels.append(
        label(
            5, (), status="excluded", control_answer="12", control_agrees=False, importance=None, value=None
        )
    )
    windows = [window(number, index) for number in range(1, 5) for index in range(3)]
    for place in (0, 3, 6, 9, 10):
        windows[place] |= {"flipped": True, "answer": "9", "accepted_draft": 1, "decoded": 4}
    windows[10] |= {"answered": False, "answer": None}
    windows[11] |= {"status": "error", "reason": "out of memory", "flipped": None, "answered": None}
    probed = [
        {"trace_id": f"t{number}", "group": "hidden", "n_tokens": len(TOKENS), "status": "ok", "reason": ""}
        for number in range(1, 5)
    ]
    probed[3] |= {"status": "error", "reason": "NaN in layer 2"}
    return {
        "traces": frame(schemas.TRACES, traces),
        "windows": frame(schemas.WINDOWS, windows),
        "eviction_kl": frame(schemas.EVICTION_KL, []),
        "token_labels": frame(schemas.TOKEN_LABELS, labels),
        "probed": frame(schemas.PROBED, probed),
        "correlations": correlations(),
    }


def empty_tables() -> dict[str, pl.DataFrame]:
    names = ("traces", "windows", "eviction_kl", "token_labels", "probed", "correlations")
    return {name: frame(schemas.TABLES[name], []) for name in names}


def manifest() -> dict[str, Any]:
    return {
        "cfkv_version": "0.1.0",
        "stages": {
            "trace": {
                "config": {"dataset": "registers", "mode": "generate"},
                "fingerprint": "00112233aabbccdd",
                "started": "2025-11-30T00:00:00+00:00",
                "finished": "2025-11-30T00:01:00+00:00",
                "model": {"model": "builtin", "weights": "float32"},
                "versions": {"python": "3.11.2", "torch": "2.8.0"},
            },
            "label/occlusion": {
                "config": {"kind": "occlusion", "window": 32, "stride": 16, "replacement": "auto"},
                "fingerprint": "ffee",
                "self_check": ["the null window flips nothing: 0 of 4"],
            },
        },
    }
