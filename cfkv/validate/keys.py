"""Checks of every table: keys, partitions, required values, and traces that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from cfkv.schemas import TABLES, TRACES
from cfkv.validate._check import EXAMPLES, Check
from cfkv.validate._content import Content

# What a row that did not fail must have.
REQUIRED: Mapping[str, Sequence[str]] = {
    "traces": ("token_ids", "token_texts", "logprobs", "prompt_len", "reasoning_start", "reasoning_stop")
    + ("answer_start", "answer_stop"),
    "windows": ("start", "stop", "flipped", "delta_nll"),
    "eviction_kl": ("step", "blocks", "kl", "kl_by_offset"),
    "token_labels": ("importance", "value", "n_windows"),
    "probed": ("n_tokens",),
    "policy_validity": ("step", "value", "n_candidates", "n_important"),
    "judged": ("n_tokens",),
    "correlations": ("estimate", "low", "high", "n_traces", "n_tokens", "n_important"),
}
WELL = ("ok", "labelled")


def unique_keys(content: Content) -> Check:
    """The key of a row occurs once over all parts of its table, and is not null where it names something."""
    check = Check("all tables", "keys are unique over all parts")
    for (name, _), rows in content.raw.items():
        key = list(TABLES[name].key)
        check.seen += rows.height
        twice = rows.group_by(key, maintain_order=True).len().filter(pl.col("len") > 1)
        for row in twice.head(EXAMPLES).to_dicts():
            number = row.pop("len")
            check.fail(f"{name}: {_told(row)}", f"{number} rows", "1 row", row.get("trace_id"))
        check.wrong += max(0, twice.height - EXAMPLES)
    return check


def partitions(content: Content) -> Check:
    """A row lies in the folder of its kind or group."""
    check = Check("all tables", "rows lie in the folder of their kind or group")
    for (name, value), rows in content.raw.items():
        column = TABLES[name].partition
        if column is None or column not in rows.columns:
            continue
        check.seen += rows.height
        strays = rows.filter(pl.col(column).ne_missing(pl.lit(value)))
        for row in strays.head(EXAMPLES).to_dicts():
            check.fail(f"{name}: trace {row['trace_id']}", f"{column} {row[column]}", f"{column} {value}")
        check.wrong += max(0, strays.height - EXAMPLES)
    return check


def known_traces(content: Content) -> Check:
    """The trace of every row is in the traces table."""
    check = Check("all tables", "the trace of every row is in traces")
    known = content.frame(TRACES)["trace_id"].to_list()
    if (TRACES.name, None) in content.incomplete:
        return check  # the traces of the missing part are not wrong
    for (name, value), rows in content.raw.items():
        if name == TRACES.name or "trace_id" not in rows.columns:
            continue
        check.seen += rows.height
        place = name if value is None else f"{name}/{TABLES[name].partition}={value}"
        strangers = (
            rows.filter(~pl.col("trace_id").is_in(known)).group_by("trace_id", maintain_order=True).len()
        )
        for trace_id, number in strangers.iter_rows():
            check.fail(
                f"{place}: trace {trace_id}", f"{number} rows", "a row of that trace in traces", trace_id
            )
    return check


def required_values(content: Content) -> Check:
    """A row that did not fail has what its status promises; one that failed has a status, and traces a reason."""
    check = Check("all tables", "rows that did not fail are complete, and others say why")
    for (name, _), rows in content.raw.items():
        check.seen += rows.height
        good = rows.filter(pl.col("status").is_in(WELL)) if "status" in rows.columns else rows
        for column in REQUIRED.get(name, ()):
            lacking = good.filter(pl.col(column).is_null())
            for row in lacking.head(EXAMPLES).to_dicts():
                check.fail(
                    f"{name}: {_told(_key(name, row))}", f"{column} is null", "a value", row.get("trace_id")
                )
            check.wrong += max(0, lacking.height - EXAMPLES)
        if "status" not in rows.columns:
            continue
        mute = rows.filter(
            pl.col("status").is_null()
            | (~pl.col("status").is_in(WELL) & (pl.col("reason").fill_null("") == ""))
        )
        for row in mute.head(EXAMPLES).to_dicts():
            seen = f"status {row['status']}, reason {row['reason']!r}"
            check.fail(
                f"{name}: {_told(_key(name, row))}", seen, "a status, with a reason unless all is well"
            )
        check.wrong += max(0, mute.height - EXAMPLES)
    return check


def _key(name: str, row: Mapping[str, object]) -> dict[str, object]:
    return {column: row[column] for column in TABLES[name].key}


def _told(key: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in key.items())
