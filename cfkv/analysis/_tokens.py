"""From tables to arrays: the tested tokens of each label kind, and the signal rows of each trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cfkv.errors import CfkvError

SIGNAL_KEY = ("trace_id", "layer", "kv_head")


@dataclass(frozen=True)
class Span:
    """The reasoning span of one trace, and its problem."""

    start: int
    stop: int
    length: int  # of token_ids
    problem: tuple[str, str]


@dataclass(frozen=True)
class LabelledTokens:
    """The tested tokens of one label kind, trace after trace in the order of `trace_ids`.

    Attributes
    ----------
    trace_ids : mapping from trace id to its code 0..traces-1
    clusters : array, shape (traces,)
        Problem of each trace, 0..problems-1.
    places : one array per trace
        Tested tokens, counted from reasoning_start.
    offsets : array, shape (traces + 1,)
        Where each trace's tokens begin in `positive`, `values` and `traces`.
    positive, values, traces : array, shape (tokens,)
        The label (importance 1), the graded value (NaN where there is none), and the code of the trace.
    """

    kind: str
    trace_ids: Mapping[str, int]
    clusters: NDArray[np.int64]
    places: tuple[NDArray[np.int64], ...]
    offsets: NDArray[np.int64]
    positive: NDArray[np.bool_]
    values: NDArray[np.float32]
    traces: NDArray[np.int64]


def reasoning_spans(traces: pl.DataFrame) -> dict[str, Span]:
    """The reasoning span of every trace that has one, by trace id."""
    rows = traces.select(
        "trace_id",
        "reasoning_start",
        "reasoning_stop",
        pl.col("token_ids").list.len().alias("length"),
        "dataset",
        "problem_id",
    ).drop_nulls(("reasoning_start", "reasoning_stop", "length"))
    return {
        trace_id: Span(start, stop, length, (dataset, problem))
        for trace_id, start, stop, length, dataset, problem in rows.iter_rows()
    }


def labelled_tokens(token_labels: pl.DataFrame, kind: str, spans: Mapping[str, Span]) -> LabelledTokens:
    """The tested tokens (importance >= 0, inside the reasoning) of the labelled traces of one kind.

    Traces are sorted by id, so that the order of rows never matters.

    Raises
    ------
    CfkvError
        For a label of an unknown trace, or one that does not cover the trace's tokens.
    """
    rows = token_labels.filter((pl.col("kind") == kind) & (pl.col("status") == "labelled")).sort("trace_id")
    places, labels, values, names = [], [], [], []
    for trace_id, importance, value in rows.select("trace_id", "importance", "value").iter_rows():
        if trace_id not in spans:
            raise CfkvError(
                f"token_labels of kind {kind!r} has the trace {trace_id!r}, which traces lacks (or without a "
                "reasoning span); pass the traces of the same run"
            )
        span = spans[trace_id]
        label = np.asarray(importance, dtype=np.int8)
        _check_length(f"importance of kind {kind!r}", trace_id, label.size, span)
        graded = np.full(label.size, np.nan) if value is None else np.array(value, dtype=np.float32)
        _check_length(f"value of kind {kind!r}", trace_id, graded.size, span)
        label = label[span.start : span.stop]
        tested = np.flatnonzero(label >= 0)
        names.append(trace_id)
        places.append(tested)
        labels.append(label[tested] == 1)
        values.append(graded[span.start : span.stop][tested].astype(np.float32))
    problems = sorted({spans[name].problem for name in names}, key=repr)
    codes = {problem: code for code, problem in enumerate(problems)}
    sizes = np.array([place.size for place in places], dtype=np.int64)
    return LabelledTokens(
        kind,
        {name: code for code, name in enumerate(names)},
        np.array([codes[spans[name].problem] for name in names], dtype=np.int64),
        tuple(places),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.concatenate([np.zeros(0, dtype=np.bool_), *labels]),
        np.concatenate([np.zeros(0, dtype=np.float32), *values]),
        np.repeat(np.arange(len(names)), sizes),
    )


def signal_names(signals: Mapping[str, pl.DataFrame]) -> list[tuple[str, str]]:
    """All (signal, group) in the order of their names.

    Raises
    ------
    CfkvError
        If two groups have a signal of the same name: their rows could not be told apart.
    """
    owner: dict[str, str] = {}
    for group in sorted(signals):
        for name in signals[group].columns:
            if name in SIGNAL_KEY:
                continue
            if name in owner:
                raise CfkvError(
                    f"signal {name!r} is in both groups {owner[name]!r} and {group!r}; leave one group out"
                )
            owner[name] = group
    return sorted(owner.items())


@dataclass(frozen=True)
class SignalRows:
    """One signal of all traces: the rows of a trace are neighbours, its layers ascending.

    Attributes
    ----------
    layers : the layers that occur, ascending (None last: a signal without layers)
    trace_ids, layer_codes : one per row; `layers[layer_codes[row]]` is the row's layer
    offsets, values : the tokens of row r are `values[offsets[r]:offsets[r + 1]]`
    """

    signal: str
    layers: tuple[int | None, ...]
    trace_ids: list[str]
    layer_codes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, frame: pl.DataFrame, signal: str, wanted: set[str]) -> SignalRows:
        """Read the mean over KV heads (kv_head = -1) of one signal, for the wanted traces."""
        kept = (
            frame.lazy()
            .filter(pl.col("kv_head") == -1)
            .select("trace_id", "layer", signal)
            .drop_nulls(("trace_id", signal))
        )
        # Layers of unwanted traces too: a label without any trace still has its rows, with a reason.
        layers = tuple(kept.select("layer").unique().collect()["layer"].sort(nulls_last=True).to_list())
        rows = (
            kept.filter(pl.col("trace_id").is_in(list(wanted)))
            .sort("trace_id", "layer", nulls_last=True)
            .collect()
        )
        code = {layer: index for index, layer in enumerate(layers)}
        lists = rows[signal].cast(pl.List(pl.Float32)).rechunk().to_arrow()
        return cls(
            signal,
            layers,
            rows["trace_id"].to_list(),
            np.array([code[layer] for layer in rows["layer"]], dtype=np.int64),
            lists.offsets.to_numpy().astype(np.int64),
            lists.values.to_numpy(zero_copy_only=False),
        )

    def blocks(
        self, spans: Mapping[str, Span]
    ) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        """Yield per trace: its id, its layer codes, and its reasoning span of shape (layers, tokens)."""
        row = 0
        while row < len(self.trace_ids):
            trace_id, first = self.trace_ids[row], row
            while row < len(self.trace_ids) and self.trace_ids[row] == trace_id:
                row += 1
            span = spans[trace_id]
            for size in np.diff(self.offsets[first : row + 1]):
                _check_length(f"signal {self.signal!r}", trace_id, int(size), span)
            whole = self.values[self.offsets[first] : self.offsets[row]].reshape(row - first, span.length)
            yield trace_id, self.layer_codes[first:row], whole[:, span.start : span.stop]


def _check_length(what: str, trace_id: str, size: int, span: Span) -> None:
    if size != span.length:
        raise CfkvError(
            f"{what} of trace {trace_id!r} has {size} values for {span.length} token_ids; every list covers "
            "all tokens: write it again from the traces of this run"
        )
