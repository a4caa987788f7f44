"""The correlation study: every signal, layer and smoothing against every label (EpiKV; methods.md 5.2).

The unit of inference is the trace, or the problem where one problem has several traces. Sorting is the only
work per token and is done once per (kind, signal, layer, smoothing); everything after it is sums per trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from cfkv.analysis import _tokens, association, intervals, resampling
from cfkv.analysis.intervals import Estimate, WithinEstimate
from cfkv.analysis.multiplicity import benjamini_hochberg
from cfkv.analysis.smoothing import smooth
from cfkv.config import CorrelateConfig
from cfkv.schemas import CORRELATIONS

MEASURES = ("spearman_pooled", "spearman_within", "auroc")
POSITION = "position"


def correlate(
    traces: pl.DataFrame,
    token_labels: pl.DataFrame,
    signals: Mapping[str, pl.DataFrame],
    config: CorrelateConfig,
) -> pl.DataFrame:
    """Hold every signal against every kind of label.

    Parameters
    ----------
    traces, token_labels : DataFrame
        The tables of those names. Used are the tested tokens (importance >= 0) of traces whose label status
        is `labelled`; the label is importance 1.
    signals : mapping from group to DataFrame
        Signal tables; rows with kv_head = -1 are used. A trace that a group lacks is left out of its rows.
    config : CorrelateConfig

    Returns
    -------
    DataFrame
        The table `correlations`, sorted by its key: one row per kind, signal, layer, smoothing and measure.
        The signal `position` (index within the reasoning, no layer, raw) is always among them: a signal that
        only drifts along a trace looks like it.
        Positive (AUROC above 0.5) = the signal is larger on important tokens. A row has an estimate, an
        interval and a p-value, or none of them and a `nan_reason`. The counts are of what entered the
        estimate: spearman_within leaves out traces in which signal or label is constant.

    Raises
    ------
    CfkvError
        For lists that do not cover their trace's tokens, labels of unknown traces, or a signal that two
        groups have.
    """
    spans = _tokens.reasoning_spans(traces)
    kinds = sorted(token_labels["kind"].unique().to_list())
    studies = [_Study(_tokens.labelled_tokens(token_labels, kind, spans), config) for kind in kinds]
    rows: list[tuple[object, ...]] = []
    for name, group in _tokens.signal_names(signals):
        labelled = {trace_id for study in studies for trace_id in study.tokens.trace_ids}
        signal = _tokens.SignalRows.of(signals[group], name, labelled)
        for smoothing in config.smoothings:
            tables = signal_values(signal, smoothing, spans, [study.tokens for study in studies], config)
            for study, table in zip(studies, tables, strict=True):
                for layer, values in zip(signal.layers, table, strict=True):
                    for result in study.measure(values):
                        rows.append((study.tokens.kind, name, layer, smoothing, *result.cells()))
    for study in studies if POSITION not in dict(_tokens.signal_names(signals)) else ():
        places = np.concatenate([np.zeros(0), *study.tokens.places]).astype(np.float32)
        rows += [
            (study.tokens.kind, POSITION, None, "raw", *result.cells()) for result in study.measure(places)
        ]
    return _adjusted(rows, config.level)


def signal_values(
    signal: _tokens.SignalRows,
    smoothing: str,
    spans: Mapping[str, _tokens.Span],
    tokens: list[_tokens.LabelledTokens],
    config: CorrelateConfig,
) -> list[NDArray[np.float32]]:
    """Smooth one signal over each trace's reasoning and pick the tested tokens of each label kind.

    Returns
    -------
    list of arrays, shape (layers, tokens)
        One per kind; NaN where a trace has no such layer. float32 is what the table stores: it keeps rounding
        noise of the smoothing from breaking ties.
    """
    tables = [np.full((len(signal.layers), kind.positive.size), np.nan, dtype=np.float32) for kind in tokens]
    for trace_id, layer_codes, block in signal.blocks(spans):
        smoothed = smooth(block, smoothing, alpha=config.ema_alpha, window=config.rolling_window)
        for table, kind in zip(tables, tokens, strict=True):
            code = kind.trace_ids.get(trace_id)
            if code is not None:
                here = slice(kind.offsets[code], kind.offsets[code + 1])
                table[layer_codes, here] = smoothed[:, kind.places[code]]
    return tables


@dataclass(frozen=True)
class _Result:
    measure: str
    estimate: Estimate
    n_traces: int
    n_tokens: int
    n_important: int

    def cells(self) -> tuple[object, ...]:
        value = self.estimate
        return (
            *(self.measure, value.estimate, value.low, value.high, value.pvalue),
            *(self.n_traces, self.n_tokens, self.n_important, value.reason),
        )


class _Study:
    """The tokens of one label kind, with the resamples that all its rows share."""

    def __init__(self, tokens: _tokens.LabelledTokens, config: CorrelateConfig) -> None:
        self.tokens = tokens
        self.config = config
        self._counts: dict[int, NDArray[np.float64]] = {}

    def counts(self, n_clusters: int) -> NDArray[np.float64]:
        """The same resamples for every row with this many clusters, whatever was asked before."""
        if n_clusters not in self._counts:
            rng = np.random.default_rng(self.config.seed)
            self._counts[n_clusters] = resampling.cluster_counts(n_clusters, self.config.draws, rng)
        return self._counts[n_clusters]

    def measure(self, values: NDArray[np.float32]) -> Iterator[_Result]:
        """All measures of one (signal, layer, smoothing); `values` has one value per tested token."""
        positive, owner = self.tokens.positive, self.tokens.traces
        finite = np.isfinite(values)
        if not finite.all():
            values, positive, owner = values[finite], positive[finite], owner[finite]
        n_traces = len(self.tokens.trace_ids)
        size = np.bincount(owner, minlength=n_traces)
        important = np.bincount(owner[positive], minlength=n_traces)
        present = size > 0
        problems, problem = np.unique(self.tokens.clusters[present], return_inverse=True)
        cluster_of = np.zeros(n_traces, dtype=np.int64)
        cluster_of[present] = problem
        n_present, n_clusters = int(present.sum()), problems.size
        sums = (n_present, int(size.sum()), int(important.sum()))

        ranking = association.rank(values)
        reason = _degenerate(ranking, sums[1], sums[2])
        if reason:
            for measure in MEASURES:
                yield _Result(measure, intervals.undefined(reason), *sums)
            return
        few = intervals.too_few(n_present, n_clusters)
        level = self.config.level

        if few:
            pooled = intervals.undefined(few)
        else:
            pooled = intervals.fisher_z_interval(association.spearman(ranking, positive), n_clusters, level)
        yield _Result("spearman_pooled", pooled, *sums)

        rhos = association.spearman_within(ranking, positive, owner, n_traces)
        # A trace without a value is absent, not dropped as constant.
        within: WithinEstimate = intervals.within_interval(rhos[present], problem, level)
        used = np.isfinite(rhos)
        yield _Result(
            "spearman_within", within, within.n_traces, int(size[used].sum()), int(important[used].sum())
        )

        if few:
            area = intervals.undefined(few)
        else:
            clusters = cluster_of[owner]
            wins = association.pairwise_wins(ranking, positive, clusters, n_clusters)
            positives = np.bincount(clusters[positive], minlength=n_clusters).astype(np.float64)
            negatives = np.bincount(clusters[~positive], minlength=n_clusters).astype(np.float64)
            area = resampling.bootstrap_auroc(wins, positives, negatives, self.counts(n_clusters), level)
        yield _Result("auroc", area, *sums)


def _degenerate(ranking: association.Ranking, n_tokens: int, n_important: int) -> str | None:
    if n_tokens == 0:
        return "no tested tokens"
    if n_important in (0, n_tokens):
        return "one class only"
    return "constant signal" if ranking.constant else None


def _adjusted(rows: list[tuple[object, ...]], level: float) -> pl.DataFrame:
    """The rows as a table, with p-values adjusted within kind and measure."""
    measured = ("measure", "estimate", "low", "high", "pvalue", "n_traces", "n_tokens", "n_important")
    names = ("kind", "signal", "layer", "smoothing", *measured, "nan_reason")
    columns: dict[str, Any] = dict.fromkeys(names, ())
    if rows:
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    families: dict[tuple[object, object], list[int]] = {}
    for index, family in enumerate(zip(columns["kind"], columns["measure"], strict=True)):
        families.setdefault(family, []).append(index)
    raw = np.array(columns["pvalue"], dtype=np.float64)
    adjusted = np.full(raw.shape, np.nan)
    for members in families.values():
        adjusted[members] = benjamini_hochberg(raw[members])
    columns |= {"adjusted_pvalue": adjusted, "level": [level] * len(rows), "control": ["none"] * len(rows)}
    # Without from_pandas=True a NaN stays NaN: null would say that nobody looked.
    arrays = [pa.array(columns[field.name], type=field.type) for field in CORRELATIONS.schema]
    frame = pl.DataFrame(pl.from_arrow(pa.table(arrays, schema=CORRELATIONS.schema)))
    return frame.sort(CORRELATIONS.key, nulls_last=True)
