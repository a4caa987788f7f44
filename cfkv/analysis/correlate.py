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
from cfkv.analysis.high_damage import NO_HIGH_DAMAGE, graded_kinds, with_high_damage
from cfkv.analysis.intervals import Estimate, WithinEstimate
from cfkv.analysis.multiplicity import benjamini_hochberg
from cfkv.analysis.smoothing import smooth
from cfkv.config import CorrelateConfig
from cfkv.schemas import CORRELATIONS

BINARY = ("spearman_pooled", "spearman_within", "auroc")
GRADED = ("spearman_value_pooled", "spearman_value_within")
MEASURES = (*BINARY, *GRADED)
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
        is `labelled`; the label is importance 1. For kinds that store a value and no importance it is high damage
        (`high_damage.high_damage`, with config.high_damage), and traces of one value alone are left out.
    signals : mapping from group to DataFrame
        Signal tables; rows with kv_head = -1 are used. A trace that a group lacks is left out of its rows.
    config : CorrelateConfig

    Returns
    -------
    DataFrame
        The table `correlations`, sorted by its key: one row per kind, signal, layer, smoothing and measure.
        The signal `position` (index within the reasoning, no layer, raw) is always among them: a signal that
        only drifts along a trace looks like it. spearman_pooled, spearman_within and auroc are against the label,
        spearman_value_pooled and spearman_value_within against the kind's graded value at the same tokens.
        Positive (AUROC above 0.5) = the signal is larger on important tokens. A row has an estimate, an
        interval and a p-value, or none of them and a `nan_reason`. The counts are of what entered the
        estimate: the within measures leave out traces in which signal or label (or value) is constant.

    Raises
    ------
    CfkvError
        For lists that do not cover their trace's tokens, labels of unknown traces, or a signal that two
        groups have.
    """
    spans = _tokens.reasoning_spans(traces)
    kinds = sorted(token_labels["kind"].unique().to_list())
    graded = graded_kinds(token_labels)
    decided = with_high_damage(token_labels, traces, config.high_damage)
    studies = [
        _Study(
            _tokens.labelled_tokens(decided, kind, spans),
            config,
            untested=NO_HIGH_DAMAGE if kind in graded else "no tested tokens",
        )
        for kind in kinds
    ]
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


@dataclass(frozen=True)
class _Sample:
    """The tokens that enter a measure, with their traces and problems.

    `counts` is traces, tokens, important tokens; `problem` is the problem of each present trace, `cluster_of` the
    same over all traces. A trace without a token here is absent.
    """

    ranking: association.Ranking
    positive: NDArray[np.bool_]
    graded: NDArray[np.float32]
    owner: NDArray[np.int64]
    size: NDArray[np.int64]
    important: NDArray[np.int64]
    problem: NDArray[np.int64]
    cluster_of: NDArray[np.int64]

    @property
    def present(self) -> NDArray[np.bool_]:
        """Traces with a token here."""
        return self.size > 0

    @property
    def n_clusters(self) -> int:
        """Problems with a token here."""
        return int(self.problem.max()) + 1 if self.problem.size else 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """Traces, tokens, important tokens."""
        return int(self.present.sum()), int(self.size.sum()), int(self.important.sum())

    @property
    def few(self) -> str | None:
        """Why there is no interval over traces, or None."""
        return intervals.too_few(self.counts[0], self.n_clusters)


class _Study:
    """The tokens of one label kind, with the resamples that all its rows share.

    `untested` is the reason of all rows if there are no tokens.
    """

    def __init__(self, tokens: _tokens.LabelledTokens, config: CorrelateConfig, *, untested: str) -> None:
        self.tokens = tokens
        self.config = config
        self.untested = untested
        self._counts: dict[int, NDArray[np.float64]] = {}
        self._whole_ranks: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def counts(self, n_clusters: int) -> NDArray[np.float64]:
        """The same resamples for every row with this many clusters, whatever was asked before."""
        if n_clusters not in self._counts:
            rng = np.random.default_rng(self.config.seed)
            self._counts[n_clusters] = resampling.cluster_counts(n_clusters, self.config.draws, rng)
        return self._counts[n_clusters]

    def measure(self, values: NDArray[np.float32]) -> Iterator[_Result]:
        """All measures of one (signal, layer, smoothing); `values` has one value per tested token."""
        finite = np.isfinite(values)
        sample = self._sample(values, finite)
        yield from self._binary(sample)
        valued = finite & np.isfinite(self.tokens.values)
        yield from self._graded(sample if valued.sum() == finite.sum() else self._sample(values, valued))

    def _sample(self, values: NDArray[np.float32], kept: NDArray[np.bool_]) -> _Sample:
        tokens, n_traces = self.tokens, len(self.tokens.trace_ids)
        positive, graded, owner = tokens.positive, tokens.values, tokens.traces
        if not kept.all():
            values, positive, graded, owner = values[kept], positive[kept], graded[kept], owner[kept]
        size = np.bincount(owner, minlength=n_traces)
        present = size > 0
        _, problem = np.unique(tokens.clusters[present], return_inverse=True)
        cluster_of = np.zeros(n_traces, dtype=np.int64)
        cluster_of[present] = problem
        important = np.bincount(owner[positive], minlength=n_traces)
        ranking = association.rank(values)
        return _Sample(ranking, positive, graded, owner, size, important, problem, cluster_of)

    def _binary(self, sample: _Sample) -> Iterator[_Result]:
        """Against the 0/1 label."""
        counts, level, n_traces = sample.counts, self.config.level, len(self.tokens.trace_ids)
        ranking, positive, owner, few = sample.ranking, sample.positive, sample.owner, sample.few
        reason = self._degenerate(sample, "one class only" if counts[2] in (0, counts[1]) else None)
        if reason:
            for measure in BINARY:
                yield _Result(measure, intervals.undefined(reason), *counts)
            return

        if few:
            pooled = intervals.undefined(few)
        else:
            rho = association.spearman(ranking, positive)
            pooled = intervals.fisher_z_interval(rho, sample.n_clusters, level)
        yield _Result("spearman_pooled", pooled, *counts)

        rhos = association.spearman_within(ranking, positive, owner, n_traces)
        yield self._within("spearman_within", sample, rhos)

        if few:
            area = intervals.undefined(few)
        else:
            clusters, n_clusters = sample.cluster_of[owner], sample.n_clusters
            wins = association.pairwise_wins(ranking, positive, clusters, n_clusters)
            positives = np.bincount(clusters[positive], minlength=n_clusters).astype(np.float64)
            negatives = np.bincount(clusters[~positive], minlength=n_clusters).astype(np.float64)
            area = resampling.bootstrap_auroc(wins, positives, negatives, self.counts(n_clusters), level)
        yield _Result("auroc", area, *counts)

    def _graded(self, sample: _Sample) -> Iterator[_Result]:
        """Against the kind's value; `sample` holds only tokens that have one."""
        counts, n_traces = sample.counts, len(self.tokens.trace_ids)
        if counts[1] == 0 and self.tokens.positive.size:
            reason: str | None = "no values"
        else:
            constant = counts[1] > 0 and bool(sample.graded.min() == sample.graded.max())
            reason = self._degenerate(sample, "constant value" if constant else None)
        if reason:
            for measure in GRADED:
                yield _Result(measure, intervals.undefined(reason), *counts)
            return
        whole, within = self._value_ranks(sample)
        if sample.few:
            pooled = intervals.undefined(sample.few)
        else:
            rho = association.correlate_ranks(association.centred_ranks(sample.ranking), whole)
            pooled = intervals.fisher_z_interval(rho, sample.n_clusters, self.config.level)
        yield _Result("spearman_value_pooled", pooled, *counts)
        ranks = association.centred_ranks_within(sample.ranking, sample.owner, n_traces)
        rhos = association.correlate_ranks_within(ranks, within, sample.owner, n_traces)
        yield self._within("spearman_value_within", sample, rhos)

    def _within(self, measure: str, sample: _Sample, rhos: NDArray[np.float64]) -> _Result:
        # A trace without a value is absent, not dropped as constant.
        estimate: WithinEstimate = intervals.within_interval(
            rhos[sample.present], sample.problem, self.config.level
        )
        used = np.isfinite(rhos)
        n_tokens, n_important = int(sample.size[used].sum()), int(sample.important[used].sum())
        return _Result(measure, estimate, estimate.n_traces, n_tokens, n_important)

    def _value_ranks(self, sample: _Sample) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Centred ranks of the graded value, pooled and within traces; those of all tokens are made once."""
        complete = sample.graded.size == self.tokens.values.size
        if complete and self._whole_ranks is not None:
            return self._whole_ranks
        ranking = association.rank(sample.graded)
        within = association.centred_ranks_within(ranking, sample.owner, len(self.tokens.trace_ids))
        found = (association.centred_ranks(ranking), within)
        if complete:
            self._whole_ranks = found
        return found

    def _degenerate(self, sample: _Sample, label_reason: str | None) -> str | None:
        if sample.ranking.order.size == 0:
            return "no tested tokens" if self.tokens.positive.size else self.untested
        return label_reason or ("constant signal" if sample.ranking.constant else None)


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
