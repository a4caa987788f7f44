"""Labels of the built-in model against the truth that was planted in its problems."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from cfkv.analysis.association import auroc
from cfkv.loader import load
from cfkv.problems.registers import planted_truth


def truth_line(run: Path, kind: str) -> str | None:
    """One sentence on how a label kind meets the planted truth, or None without labelled registers traces.

    Load-bearing tokens are slot name, digit and fused fact of each tagged line; filler is everything that lies
    off the tagged lines. A window marks what is near a fact as well, which bounds the AUROC.
    """
    tables = load(run)
    traces = tables.traces.filter(pl.col("dataset") == "registers")
    labels = tables.token_labels.filter((pl.col("kind") == kind) & (pl.col("status") == "labelled"))
    rows = traces.join(labels, on="trace_id").collect().to_dicts()
    if not rows:
        return None
    found, bearing, fact = [], [], []
    for row in rows:
        span = slice(row["reasoning_start"], row["reasoning_stop"])
        truth = planted_truth("".join(row["token_texts"][span]).split())
        found.append(np.array(row["importance"][span], dtype=np.float64))
        bearing.append(truth.occlusion)
        fact.append(truth.fact)
    importance, load_bearing, on_fact = np.concatenate(found), np.concatenate(bearing), np.concatenate(fact)
    return (
        f"planted truth: {kind} calls {importance[load_bearing].mean():.1%} of {load_bearing.sum():,} load-bearing "
        f"tokens important and {importance[~on_fact].mean():.1%} of {(~on_fact).sum():,} tokens off the facts "
        f"(AUROC {auroc(importance, load_bearing):.3f}, {len(rows)} traces)"
    )


def print_truth(run: Path) -> None:
    """Print the sentence of each label kind."""
    for kind in sorted(load(run).token_labels.select("kind").unique().collect()["kind"]):
        line = truth_line(run, kind)
        if line is not None:
            print(line)
