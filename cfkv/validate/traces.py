"""Checks of the traces table."""

from __future__ import annotations

import polars as pl

from cfkv.schemas import TRACES
from cfkv.validate._check import Check
from cfkv.validate._content import Content, in_order

SPANS = ("prompt_len", "reasoning_start", "reasoning_stop", "answer_start", "answer_stop")


def ordered_spans(content: Content) -> Check:
    """Prompt, reasoning and answer follow each other inside the tokens."""
    check = Check("traces", "prompt, reasoning and answer follow each other inside the tokens")
    rows = _good(content).select("trace_id", *SPANS, length=pl.col("token_ids").list.len())
    for row in rows.drop_nulls().to_dicts():
        check.seen += 1
        if not in_order(row):
            seen = ", ".join(f"{name} {row[name]}" for name in (*SPANS, "length"))
            check.fail(f"trace {row['trace_id']}", seen, "0 <= each <= the next", row["trace_id"])
    return check


def list_lengths(content: Content) -> Check:
    """One text per token id, and one log-probability per token after the prompt."""
    check = Check("traces", "texts and log-probabilities are as many as their tokens")
    rows = _good(content).select(
        "trace_id",
        "prompt_len",
        length=pl.col("token_ids").list.len(),
        texts=pl.col("token_texts").list.len(),
        logprobs=pl.col("logprobs").list.len(),
    )
    for row in rows.drop_nulls().to_dicts():
        check.seen += 1
        wanted = (row["length"], row["length"] - row["prompt_len"])
        if (row["texts"], row["logprobs"]) != wanted:
            check.fail(
                f"trace {row['trace_id']}",
                f"{row['texts']} texts, {row['logprobs']} log-probabilities",
                f"{wanted[0]} and {wanted[1]}",
                row["trace_id"],
            )
    return check


def _good(content: Content) -> pl.DataFrame:
    return content.frame(TRACES).filter(pl.col("status") == "ok")
