"""Labels of the built-in model against the truth that was planted in its problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cfkv.analysis._tokens import LabelledTokens, labelled_tokens, reasoning_spans
from cfkv.analysis.association import pairwise_wins, rank
from cfkv.analysis.high_damage import graded_kinds, with_high_damage
from cfkv.analysis.intervals import Estimate, undefined
from cfkv.analysis.resampling import bootstrap_auroc, bootstrap_share, cluster_counts
from cfkv.config import CorrelateConfig
from cfkv.kinds import Truth, kind_facts
from cfkv.loader import load
from cfkv.problems.registers import planted_truth

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TruthScore:
    """How one label kind meets the planted truth, over the tested tokens of its labelled traces.

    Attributes
    ----------
    truth : which planted tokens it is held against (`cfkv.kinds`)
    graded : the label is high damage, made from the value by analysis
    recall : share of the load-bearing tokens that are labelled important (or high damage)
    ceiling : the largest recall that as many labels can have, below 1 where a trace has fewer of them than truth
    label_auroc, value_auroc : of the 0/1 label and of the graded value for the truth
    off_facts : share of the tokens off the tagged lines that are labelled
    n_bearing, n_untested, n_off, n_traces : load-bearing tokens tested and not, tokens off the facts, traces
    """

    kind: str
    truth: Truth
    graded: bool
    recall: Estimate
    ceiling: float
    label_auroc: Estimate
    value_auroc: Estimate
    off_facts: Estimate
    n_bearing: int
    n_untested: int
    n_off: int
    n_traces: int


def truth_score(run: Path, kind: str, config: CorrelateConfig | None = None) -> TruthScore | None:
    """Score a label kind, or None without labelled registers traces that the words of the problem can be read from.

    `config` says the share of high damage, the bootstrap's draws, its level and its seed; traces are resampled
    (problems, where one has several traces).
    """
    config = config or CorrelateConfig()
    tables = load(run)
    traces = tables.traces.filter(pl.col("dataset") == "registers").collect()
    planted = _planted(traces, kind_facts(kind).truth)
    chosen = (
        pl.col("trace_id").is_in(list(planted)) & (pl.col("kind") == kind) & (pl.col("status") == "labelled")
    )
    labels = tables.token_labels.filter(chosen).collect()
    if labels.is_empty():
        return None
    spans = reasoning_spans(traces)
    tokens = labelled_tokens(with_high_damage(labels, traces, config.high_damage), kind, spans)
    held = [planted[trace_id] for trace_id in tokens.trace_ids]
    bearing, fact = (
        np.concatenate([truth[row][place] for truth, place in zip(held, tokens.places, strict=True)])
        for row in (0, 1)
    )
    n_clusters = int(tokens.clusters.max()) + 1
    owner = tokens.clusters[tokens.traces]
    counts = cluster_counts(n_clusters, config.draws, np.random.default_rng(config.seed))
    finite = np.isfinite(tokens.values)

    def area(values: NDArray[np.float32], kept: Bools) -> Estimate:
        return _area(values[kept], bearing[kept], owner[kept], counts, config.level)

    def share(among: Bools) -> Estimate:
        totals = np.bincount(owner[among], minlength=n_clusters).astype(np.float64)
        labelled = np.bincount(owner[among & tokens.positive], minlength=n_clusters).astype(np.float64)
        return _spread(bootstrap_share(labelled, totals, counts, config.level), n_clusters)

    n_bearing = int(bearing.sum())
    return TruthScore(
        kind=kind,
        truth=kind_facts(kind).truth,
        graded=kind in graded_kinds(labels),
        recall=share(bearing),
        ceiling=_ceiling(tokens, bearing),
        label_auroc=area(tokens.positive.astype(np.float32), np.ones(bearing.size, dtype=bool)),
        value_auroc=area(tokens.values, finite),
        off_facts=share(~fact),
        n_bearing=n_bearing,
        n_untested=int(sum(truth[0].sum() for truth in held)) - n_bearing,
        n_off=int((~fact).sum()),
        n_traces=len(tokens.trace_ids),
    )


def truth_line(run: Path, kind: str, config: CorrelateConfig | None = None) -> str | None:
    """One sentence on how a label kind meets the planted truth, or None without labelled registers traces.

    Load-bearing are digit and fused fact of each tagged line, and for kinds that replace text the slot name too.
    A window marks what is near a fact as well, which bounds the AUROC of its labels.
    """
    config = config or CorrelateConfig()
    score = truth_score(run, kind, config)
    if score is None:
        return None
    word = "high damage" if score.graded else "important"
    found = (
        f"planted truth ({score.truth}): {kind} calls {_percent(score.recall)} of {score.n_bearing:,} load-bearing "
        f"tokens {word} and {_percent(score.off_facts)} of {score.n_off:,} tokens off the facts"
    )
    if score.graded and score.ceiling < 1:
        found += (
            f" (at most {score.ceiling:.1%} can be: a trace has fewer {word} tokens than load-bearing ones)"
        )
    areas = f"AUROC of its value {_decimals(score.value_auroc)}"
    if not score.graded:
        areas = (
            f"AUROC of its labels {_decimals(score.label_auroc)}, of its value {_decimals(score.value_auroc)}"
        )
    untested = f"; {score.n_untested:,} load-bearing tokens untested" if score.n_untested else ""
    return (
        f"{found}; {areas} ({score.n_traces} trace{'s' if score.n_traces != 1 else ''}{untested}; "
        f"{100 * config.level:g} % intervals, traces resampled)"
    )


def print_truth(run: Path) -> None:
    """Print the sentence of each label kind."""
    for kind in sorted(load(run).token_labels.select("kind").unique().collect()["kind"]):
        line = truth_line(run, kind)
        if line is not None:
            print(line)


def _planted(traces: pl.DataFrame, truth: Truth) -> Mapping[str, tuple[Bools, Bools]]:
    """Load-bearing tokens and facts of each trace whose reasoning tokens are the words of the problem, one by one."""
    found = {}
    for row in traces.drop_nulls(("reasoning_start", "reasoning_stop", "token_texts")).to_dicts():
        texts = row["token_texts"][row["reasoning_start"] : row["reasoning_stop"]]
        words = "".join(texts).split()
        if len(words) == len(texts):
            planted = planted_truth(words)
            found[row["trace_id"]] = (getattr(planted, truth), planted.fact)
    return found


def _area(
    values: NDArray[np.float32],
    bearing: Bools,
    owner: NDArray[np.int64],
    counts: NDArray[np.float64],
    level: float,
) -> Estimate:
    if not values.size:
        return undefined("no values")
    n_clusters = counts.shape[1]
    wins = pairwise_wins(rank(values), bearing, owner, n_clusters)
    positives, negatives = (
        np.bincount(owner[side], minlength=n_clusters).astype(np.float64) for side in (bearing, ~bearing)
    )
    return _spread(bootstrap_auroc(wins, positives, negatives, counts, level), n_clusters)


def _spread(estimate: Estimate, n_clusters: int) -> Estimate:
    """The estimate without its interval where there is but one trace to resample."""
    if n_clusters > 1:
        return estimate
    return Estimate(estimate.estimate, np.nan, np.nan, np.nan, estimate.reason or "one trace")


def _ceiling(tokens: LabelledTokens, bearing: Bools) -> float:
    size = len(tokens.trace_ids)
    wanted = np.bincount(tokens.traces[bearing], minlength=size)
    given = np.bincount(tokens.traces[tokens.positive], minlength=size)
    return float(np.minimum(wanted, given).sum() / wanted.sum()) if wanted.any() else np.nan


def _percent(value: Estimate) -> str:
    if np.isnan(value.estimate):
        return f"none ({value.reason})"
    interval = "" if np.isnan(value.low) else f" [{value.low:.1%}, {value.high:.1%}]"
    return f"{value.estimate:.1%}{interval}"


def _decimals(value: Estimate) -> str:
    if np.isnan(value.estimate):
        return f"none ({value.reason})"
    interval = "" if np.isnan(value.low) else f" [{value.low:.3f}, {value.high:.3f}]"
    return f"{value.estimate:.3f}{interval}"
