"""Validity over traces: means, paired differences from random and from position, and what a person reads of them.

The trace is the unit, and the problem the cluster: tokens of a trace, and traces of a problem, are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cfkv.analysis.intervals import Estimate, too_few, within_interval
from cfkv.analysis.multiplicity import adjust
from cfkv.analysis.resampling import bootstrap_trace_mean, cluster_counts
from cfkv.config import OfflineConfig
from cfkv.schemas import VALIDITY_SUMMARY

if TYPE_CHECKING:
    from rich.table import Table

REFERENCES = ("random", "position")
RANK_CORRELATIONS = ("rho", "rho_value")
CELL = ("kind", "checkpoint", "measure", "share")
SIGNIFICANCE = 0.05
CORRECTIONS = {"holm": "Holm", "benjamini_hochberg": "Benjamini-Hochberg"}


def summarise(validity: pl.DataFrame, config: OfflineConfig) -> pl.DataFrame:
    """One row per policy, kind, checkpoint, measure and share, and one per difference from a reference policy.

    Parameters
    ----------
    validity : DataFrame
        The table `policy_validity`.
    config : OfflineConfig
        `draws`, `level`, `correction`, `seed`.

    Returns
    -------
    DataFrame
        The table `validity_summary`. A mean has a percentile interval of a bootstrap over problems; rho and rho_value
        are averaged as Fisher z with a t-interval (`intervals.within_interval`). A difference is the mean over the
        traces on which both policies have a value, of plain differences (of rho too), with a bootstrap interval and
        p-value against 0, adjusted over the policies of one kind, checkpoint, measure and share. Below 4 problems
        there is an estimate and no interval.
    """
    empty = pl.DataFrame(pl.from_arrow(VALIDITY_SUMMARY.schema.empty_table()))
    if validity.is_empty():
        return empty
    names = sorted(validity["problem_id"].unique(), key=repr)
    problems = pl.DataFrame({"problem_id": names, "cluster": range(len(names))})
    counts = cluster_counts(max(1, len(names)), config.draws, np.random.default_rng([config.seed, 0x0FF]))
    ordered = validity.join(problems, on="problem_id", nulls_equal=True).sort(*CELL, "policy", "trace_id")
    rows: list[dict[str, Any]] = []
    for key, frame in ordered.group_by(CELL, maintain_order=True):
        cell = dict(zip(CELL, key, strict=True))
        policies = {
            str(name): _Series.of(own) for (name,), own in frame.group_by("policy", maintain_order=True)
        }
        rows += _cell(cell, policies, counts, config)
    return pl.DataFrame(rows, schema=empty.schema, orient="row")


@dataclass(frozen=True)
class _Series:
    """One policy's values in one cell, in the order of the trace ids."""

    traces: NDArray[np.str_]
    clusters: NDArray[np.int64]
    values: NDArray[np.float64]
    candidates: NDArray[np.int64]
    important: NDArray[np.int64]
    reasons: list[str | None]

    @classmethod
    def of(cls, frame: pl.DataFrame) -> _Series:
        return cls(
            np.array(frame["trace_id"].to_list(), dtype=np.str_),
            frame["cluster"].to_numpy(),
            frame["value"].to_numpy(),
            frame["n_candidates"].to_numpy(),
            frame["n_important"].to_numpy(),
            frame["nan_reason"].to_list(),
        )

    def less(self, other: _Series) -> _Series:
        """Differences on the traces that both have."""
        _, own, others = np.intersect1d(self.traces, other.traces, assume_unique=True, return_indices=True)
        reasons = [self.reasons[i] or other.reasons[j] for i, j in zip(own, others, strict=True)]
        return _Series(
            self.traces[own],
            self.clusters[own],
            self.values[own] - other.values[others],
            self.candidates[own],
            self.important[own],
            reasons,
        )


def _cell(
    cell: Mapping[str, Any],
    policies: Mapping[str, _Series],
    counts: NDArray[np.float64],
    config: OfflineConfig,
) -> Iterator[dict[str, Any]]:
    for name, own in policies.items():
        if cell["measure"] in RANK_CORRELATIONS:
            found: Estimate = within_interval(own.values, own.clusters, config.level)
        else:
            found = _bootstrapped(own, counts, config)
        yield _row(cell, name, None, own, found, config)
    for reference in REFERENCES:
        if reference not in policies:
            continue
        rows = []
        for name, own in policies.items():
            if name != reference:
                pairs = own.less(policies[reference])
                rows.append(
                    _row(cell, name, reference, pairs, _bootstrapped(pairs, counts, config, null=0.0), config)
                )
        adjusted = adjust([row["pvalue"] for row in rows], config.correction)
        made = int(np.isfinite(adjusted).sum())
        for row, pvalue in zip(rows, adjusted, strict=True):
            yield {**row, "adjusted_pvalue": float(pvalue), "n_policies": made}


def _bootstrapped(
    series: _Series, counts: NDArray[np.float64], config: OfflineConfig, null: float | None = None
) -> Estimate:
    found = bootstrap_trace_mean(series.values, series.clusters, counts, config.level, null)
    known = np.isfinite(series.values)
    few = too_few(int(known.sum()), np.unique(series.clusters[known]).size)
    if few and found.reason is None:
        return Estimate(found.estimate, math.nan, math.nan, math.nan, few)
    return found


def _row(
    cell: Mapping[str, Any],
    policy: str,
    versus: str | None,
    series: _Series,
    found: Estimate,
    config: OfflineConfig,
) -> dict[str, Any]:
    known, reason = np.isfinite(series.values), found.reason
    if not known.any():  # why no trace has a value says more than that none has
        own = sorted(text for text in series.reasons if text)
        reason = max(own, key=own.count) if own else reason
    return {
        **cell,
        "policy": policy,
        "versus": versus,
        "estimate": found.estimate,
        "low": found.low,
        "high": found.high,
        "level": config.level,
        "pvalue": math.nan if versus is None else found.pvalue,
        "adjusted_pvalue": math.nan,
        "n_policies": None,
        "n_traces": int(known.sum()),
        "n_problems": np.unique(series.clusters[known]).size,
        "n_dropped": int((~known).sum()),
        "n_candidates": int(series.candidates[known].sum()),
        "n_important": int(series.important[known].sum()),
        "nan_reason": reason,
    }


def verdict(row: Mapping[str, Any] | None) -> str:
    """A difference in words: its size, and whether it can be told from none."""
    if row is None:
        return ""
    if math.isnan(row["estimate"]):
        return f"none: {row['nan_reason']}"
    size = _number(row["estimate"], "+.2f")
    pvalue = row["adjusted_pvalue"]
    if math.isnan(pvalue):
        return f"{size}, {row['nan_reason']}"
    text = "p < .001" if pvalue < 0.001 else f"p = {_number(pvalue, '.3f')}"
    if pvalue >= SIGNIFICANCE:
        return f"{size}, not different"
    return f"{size}, {text}" if row["estimate"] > 0 else f"{size}, {text}, worse"


def validity_tables(summary: pl.DataFrame, config: OfflineConfig, *, own: str | None = None) -> list[Table]:
    """One table per kind and checkpoint, best AUROC first; at most 100 columns wide.

    Parameters
    ----------
    summary : DataFrame
        The table `validity_summary`.
    config : OfflineConfig
        What it was made with.
    own : str, optional
        A policy whose row stands out.
    """
    keys = summary.select("kind", "checkpoint").unique().sort("kind", "checkpoint").rows()
    return [
        _table(kind, checkpoint, summary.filter(kind=kind, checkpoint=checkpoint), config, own)
        for kind, checkpoint in keys
    ]


def _table(kind: str, checkpoint: str, frame: pl.DataFrame, config: OfflineConfig, own: str | None) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shares = sorted(frame["share"].drop_nulls().unique())
    share = 0.25 if 0.25 in shares else shares[len(shares) // 2]
    rows = {
        (row["policy"], row["measure"], row["versus"]): row
        for row in frame.filter(pl.col("share").is_null() | (pl.col("share") == share)).iter_rows(named=True)
    }
    areas = {
        policy: row for (policy, measure, versus), row in rows.items() if (measure, versus) == ("auroc", None)
    }
    whole = max(areas.values(), key=lambda row: row["n_traces"])
    tests = max((row["n_policies"] or 0 for row in rows.values()), default=0)
    when = "at the end of the reasoning" if checkpoint == "end" else f"after {checkpoint} of the reasoning"
    table = Table(
        title=f"Policies' scores against {kind} labels, {when}",
        caption=f"Means over {whole['n_traces']} traces of {whole['n_problems']} problems with "
        f"{whole['n_candidates']:,} tested tokens, {whole['n_important']:,} of them important. Brackets: "
        f"{100 * whole['level']:g} % interval. recall, regret: with {100 * share:g} % of the tested tokens kept. "
        f"Against random: difference in AUROC on the same traces, p adjusted over {tests} policies "
        f"({CORRECTIONS[config.correction]}). The best of many is flattered.{_too_few_draws(tests, config)}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("policy", overflow="fold", max_width=26)
    for heading in ("rho", "AUROC", "AP", "recall", "regret"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("against random")
    for policy in sorted(areas, key=lambda name: (-_sortable(areas[name]["estimate"]), name)):
        cells = [rows[policy, measure, None] for measure in ("rho", "average_precision", "recall", "regret")]
        rho, precision, kept, lost = (
            _number(row["estimate"], "+.2f" if row["measure"] == "rho" else ".2f") for row in cells
        )
        told = "" if policy == "random" else verdict(rows.get((policy, "auroc", "random")))
        style = "bold" if policy == own else None
        table.add_row(escape(policy), rho, _ranged(areas[policy]), precision, kept, lost, told, style=style)
    return table


def _too_few_draws(tests: int, config: OfflineConfig) -> str:
    """A warning where Holm's first step cannot be passed, whatever the data say."""
    least = 2 / (config.draws + 1) * tests
    if config.correction != "holm" or least < SIGNIFICANCE:
        return ""
    return f" With {config.draws:,} draws no adjusted p is below {least:.2f}: raise --draws."


def _sortable(value: float) -> float:
    return -1.0 if math.isnan(value) else value


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}".replace("0.", ".", 1)


def _ranged(row: Mapping[str, Any]) -> str:
    text = _number(row["estimate"], ".2f")
    return (
        text
        if math.isnan(row["low"])
        else f"{text} [{_number(row['low'], '.2f')}, {_number(row['high'], '.2f')}]"
    )
