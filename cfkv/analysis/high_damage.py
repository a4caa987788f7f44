"""High damage: the label that analysis gives to kinds which store a value per token and no threshold.

AvoKV-E calls the top decile of a trace's removals high damage (methods.md 5.3). The tables hold the values alone;
the share is the analyst's (`cfkv correlate --high-damage`).
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from cfkv.analysis._tokens import reasoning_spans

NO_HIGH_DAMAGE = "value constant within every trace"


def high_damage(values: ArrayLike, share: float) -> NDArray[np.int8]:
    """Label the tokens of one trace whose value is among its largest.

    Parameters
    ----------
    values : array, shape (tokens,)
        NaN (or infinite) where untested.
    share : float
        Of the tested tokens, in (0, 1).

    Returns
    -------
    array of int8, shape (tokens,)
        1 high damage, 0 tested and not, -1 untested.

    Notes
    -----
    Of n tested tokens the k = max(1, share * n, rounded to the nearest whole number, halves up) largest are wanted:
    the number nearest to the share asked for, which float rounding cannot move by one as it can a ceiling
    (0.1 * 3 > 0.3). High damage is every value that is at least the k-th largest and above the smallest one.

    So the label depends on a token's value alone. Ties at the threshold are all in: tokens that were removed
    together share one value by construction, and a rule by position would split their block and favour late tokens.
    Where the tie reaches down to the smallest value, those above it are high damage alone. A trace whose values are
    all equal says nothing of any token: all of it is -1.
    """
    array = np.asarray(values, dtype=np.float32)
    labels = np.full(array.shape, -1, dtype=np.int8)
    tested = np.isfinite(array)
    found = array[tested]
    if found.size == 0 or found.min() == found.max():
        return labels
    k = max(1, math.floor(share * found.size + 0.5))
    threshold = np.sort(found)[-min(k, found.size)]
    labels[tested] = (found >= threshold) & (found > found.min())
    return labels


def graded_kinds(token_labels: pl.DataFrame) -> frozenset[str]:
    """Kinds whose labels test no token in `importance` and have a finite value somewhere."""
    tested = pl.col("importance").list.eval(pl.element() >= 0).list.any()
    valued = pl.col("value").list.eval(pl.element().is_finite()).list.any()
    kinds = (
        token_labels.filter(pl.col("status") == "labelled")
        .group_by("kind")
        .agg(tested=tested.any(), valued=valued.any())
    )
    return frozenset(kinds.filter(pl.col("valued") & ~pl.col("tested"))["kind"].to_list())


def with_high_damage(token_labels: pl.DataFrame, traces: pl.DataFrame, share: float) -> pl.DataFrame:
    """The labels as analysis reads them: `importance` of graded kinds is high damage, other kinds are untouched.

    Parameters
    ----------
    token_labels, traces : DataFrame
        The tables of those names. A value outside the reasoning counts as untested.
    share : float
        As in `high_damage`.
    """
    graded = graded_kinds(token_labels)
    if not graded:
        return token_labels
    spans = reasoning_spans(traces)
    column = []
    wanted = token_labels.select("kind", "status", "trace_id", "importance", "value")
    for kind, status, trace_id, importance, value in wanted.iter_rows():
        span = spans.get(trace_id)
        if kind not in graded or status != "labelled" or value is None or span is None:
            column.append(importance)
            continue
        inside = np.full(len(value), np.nan, dtype=np.float32)
        reasoning = slice(span.start, span.stop)
        inside[reasoning] = np.array(value, dtype=np.float32)[reasoning]
        column.append(high_damage(inside, share).tolist())
    return token_labels.with_columns(importance=pl.Series(column, dtype=pl.List(pl.Int8)))
