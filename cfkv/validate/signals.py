"""Checks of the signal tables and of what was probed."""

from __future__ import annotations

import polars as pl

from cfkv.schemas import PROBED, SIGNALS
from cfkv.validate._check import EXAMPLES, Check
from cfkv.validate._content import Content


def signal_lengths(content: Content, group: str) -> Check:
    """A signal has one value per token of its trace."""
    check = Check(f"signals/group={group}", "a signal has one value per token")
    rows = content.frame(SIGNALS, group)
    lengths = pl.DataFrame(
        [(name, trace["length"]) for name, trace in content.lengths.items()],
        schema={"trace_id": pl.String, "length": pl.UInt32},
        orient="row",
    )
    held = rows.join(lengths, on="trace_id")
    for name in [column for column in rows.columns if column not in SIGNALS.schema.names]:
        told = held.drop_nulls(name).with_columns(found=pl.col(name).list.len())
        check.seen += told.height
        wrong = told.filter(pl.col("found") != pl.col("length"))
        for row in wrong.head(EXAMPLES).to_dicts():
            where = f"trace {row['trace_id']}, {name}, layer {row['layer']}"
            check.fail(where, f"{row['found']} values", f"{row['length']} tokens", row["trace_id"])
        check.wrong += max(0, wrong.height - EXAMPLES)
    return check


def probed_traces(content: Content, group: str) -> Check:
    """A trace that was probed has its length recorded and rows of the group; one that failed has none."""
    check = Check(f"probed/group={group}", "probed traces have signals and their number of tokens")
    if {(SIGNALS.name, group), (PROBED.name, group)} & content.incomplete:
        return check
    having = set(content.frame(SIGNALS, group)["trace_id"].to_list())
    for row in content.frame(PROBED, group).to_dicts():
        trace_id = row["trace_id"]
        trace = content.lengths.get(trace_id)
        if trace is None:
            continue
        check.seen += 1
        good = row["status"] == "ok"
        if row["n_tokens"] != trace["length"]:
            check.fail(f"trace {trace_id}", f"n_tokens {row['n_tokens']}", trace["length"], trace_id)
        elif good != (trace_id in having):
            seen = "no signals" if good else f"signals, and status {row['status']}"
            check.fail(f"trace {trace_id}", seen, "signals if and only if the status is ok", trace_id)
    return check
