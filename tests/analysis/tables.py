"""Small tables for the tests of the correlation study, built by hand."""

import numpy as np
import polars as pl

PROMPT, ANSWER = 3, 2


def study(labels, signals, problems=None, kind="occlusion", values=None):
    """Tables from one label array per trace and, per signal, one (layers, reasoning tokens) array per trace.

    `values` are the graded values, the labels themselves if left out (NaN where untested). Prompt and answer
    positions get huge signal values: whoever reads them fails the test.
    """
    ids = [f"t{index:03}" for index in range(len(labels))]
    problems = problems or ids
    lengths = [PROMPT + len(label) + ANSWER for label in labels]
    traces = pl.DataFrame(
        {
            "trace_id": ids,
            "dataset": ["d"] * len(ids),
            "problem_id": problems,
            "token_ids": [list(range(length)) for length in lengths],
            "reasoning_start": [PROMPT] * len(ids),
            "reasoning_stop": [length - ANSWER for length in lengths],
            "correct": [True] * len(ids),
            "status": ["ok"] * len(ids),
        }
    )
    importance = [[-1] * PROMPT + [int(x) for x in label] + [-1] * ANSWER for label in labels]
    graded = values if values is not None else [np.where(np.array(x) < 0, np.nan, x) for x in labels]
    none = float("nan")
    value = [[none] * PROMPT + [float(x) for x in row] + [none] * ANSWER for row in graded]
    token_labels = pl.DataFrame(
        {
            "trace_id": ids,
            "problem_id": problems,
            "kind": [kind] * len(ids),
            "importance": importance,
            "value": value,
            "status": ["labelled"] * len(ids),
        },
        schema_overrides={"importance": pl.List(pl.Int8), "value": pl.List(pl.Float32)},
    )
    rows = []
    for index, trace_id in enumerate(ids):
        n_layers = next(iter(signals.values()))[index].shape[0]
        for layer in range(n_layers):
            row = {"trace_id": trace_id, "layer": layer, "kv_head": -1}
            for name, blocks in signals.items():
                row[name] = [1e9] * PROMPT + blocks[index][layer].tolist() + [-1e9] * ANSWER
            rows.append(row)
    schema = {"trace_id": pl.String, "layer": pl.Int16, "kv_head": pl.Int16}
    frame = pl.DataFrame(rows, schema={**schema, **{name: pl.List(pl.Float32) for name in signals}})
    return traces, token_labels, {"group": frame}


def planted(n_traces=20, n_tokens=60, seed=0):
    """Layer 0 is noise, layer 1 is the label plus noise; every trace has a level of its own."""
    rng = np.random.default_rng(seed)
    labels = [np.repeat(rng.random(n_tokens // 4) < 0.3, 4).astype(int) for _ in range(n_traces)]
    for label in labels:
        label[0], label[-1] = 0, 1
    blocks = [
        rng.standard_normal((2, label.size)) + rng.standard_normal() + np.stack([0 * label, 1.5 * label])
        for label in labels
    ]
    return labels, {"g": blocks}
