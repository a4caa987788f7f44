"""What a person reads: the strongest rows, one table of the study, and counts of what was labelled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from cfkv.analysis.intervals import Estimate, undefined
from cfkv.analysis.resampling import bootstrap_share, cluster_counts
from cfkv.errors import CfkvError, unknown_name
from cfkv.kinds import kind_facts
from cfkv.schemas import NOT_FAILURES

if TYPE_CHECKING:
    from rich.table import Table

SIGNIFICANCE = 0.05
LAYER_NAMES = {None: "no layer", -1: "emb"}
COMBINATION = ("kind", "signal", "layer", "smoothing", "control")


def strongest(frame: pl.DataFrame, n: int, measure: str = "spearman_within") -> pl.DataFrame:
    """The `n` rows of one measure that are farthest from "no association", strongest first.

    Parameters
    ----------
    frame : DataFrame
        The table `correlations`.
    n : int
        Rows at most.
    measure : str
        spearman_within (default: free of differences between traces) or another measure of the table.

    Returns
    -------
    DataFrame
        With the columns of `correlations`; rows without an estimate are left out, equal ones keep the order
        of their key. The strongest of many is a biased estimate: read its adjusted p-value.
    """
    null = 0.5 if measure == "auroc" else 0.0
    return (
        frame.filter((pl.col("measure") == measure) & pl.col("estimate").is_not_nan())
        .sort((pl.col("estimate") - null).abs(), *COMBINATION, descending=[True] + 5 * [False])
        .head(n)
    )


def correlation_table(frame: pl.DataFrame) -> Table:
    """One entry per label kind and signal, at the layer and smoothing with the largest |rho|.

    Rows with an adjusted p below .05 come first in that choice: on a few short traces, long smoothings give
    large correlations by chance. The p-value is that of rho within traces, adjusted over all signals, layers
    and smoothings of the label kind, so that it bears the choice. A signal without any estimate has an entry
    that says why.

    Parameters
    ----------
    frame : DataFrame
        The table `correlations`.

    Returns
    -------
    rich.table.Table
        Sorted by kind, then strongest signal first; fits 80 columns.
    """
    from rich import box
    from rich.table import Table

    level = 100 * float(frame["level"][0]) if frame.height else 95.0
    n_tests = frame.filter(pl.col("measure") == "spearman_within").height
    table = Table(
        title="Signals against labels, each at its strongest layer and smoothing",
        caption=f"rho: Spearman within traces, averaged over traces. Brackets: {level:g} % intervals. "
        "Adjusted p: of rho, Benjamini-Hochberg over all tests of a label "
        f"({n_tests:,} over all labels here). The best of many is flattered.{_high_damage(frame)}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        leading=1,
        show_edge=False,
    )
    table.add_column("signal\nlabel", no_wrap=True)
    table.add_column("layer\nsmoothing", no_wrap=True)
    for heading in ("rho", "AUROC", "adjusted p", "traces\ntokens"):
        table.add_column(
            heading, justify="right", overflow="fold", min_width=len("[+.00, +.00]") * (heading == "rho")
        )
    areas = {
        _combination(row): row for row in frame.filter(pl.col("measure") == "auroc").iter_rows(named=True)
    }
    for row in _strongest_rows(frame):
        name = f"{row['signal']}\n{row['kind']}"
        place = f"{LAYER_NAMES.get(row['layer'], row['layer'])}\n{row['smoothing']}"
        area = areas.get(_combination(row))
        counts = f"{row['n_traces']:,}\n{row['n_tokens']:,}"
        place = "-" if math.isnan(row["estimate"]) else place
        verdict = _verdict(row["adjusted_pvalue"])
        table.add_row(name, place, _ranged(row, "+.2f"), _ranged(area, ".2f"), verdict, counts)
    return table


@dataclass(frozen=True)
class LabelCounts:
    """How many traces, windows and tokens stand behind one kind of label.

    Attributes
    ----------
    n_traces : traces of the run, failed ones included
    n_correct, n_incorrect : among those that succeeded; an ungraded one is neither
    n_excluded : traces whose unmodified context no longer gave the answer (the control disagrees)
    n_labelled : traces with labels
    n_failed_by_status : failed traces by the name of the failure; failed labels as `labels: <status>`
    n_windows, n_flipped : interventions of this kind, and those that changed the answer
    n_tested, n_important : tokens of labelled traces (of graded kinds after `high_damage.with_high_damage` alone)
    important_share : pooled over tokens, with a bootstrap interval over problems; NaN with a reason below two
    """

    kind: str
    n_traces: int
    n_correct: int
    n_incorrect: int
    n_excluded: int
    n_labelled: int
    n_failed_by_status: Mapping[str, int]
    n_windows: int
    n_flipped: int
    n_tested: int
    n_important: int
    important_share: Estimate


def label_counts(
    traces: pl.DataFrame,
    token_labels: pl.DataFrame,
    windows: pl.DataFrame,
    kind: str | None = None,
    *,
    rng: np.random.Generator | None = None,
    draws: int = 2000,
    level: float = 0.95,
) -> LabelCounts:
    """Count traces, windows and tokens of one kind of label.

    Parameters
    ----------
    traces, token_labels, windows : DataFrame
        The tables of those names.
    kind : str, optional
        Needed where the labels are of several kinds.
    rng : Generator, optional
        For the interval of the important share; default_rng(0) when left out, so that two calls agree.
    draws, level :
        Of the bootstrap over problems.

    Raises
    ------
    CfkvError
        For an unknown kind, or none named where there are several.
    """
    kind = _the_kind(token_labels, kind)
    labels = token_labels.filter(pl.col("kind") == kind)
    made = windows.filter(pl.col("kind") == kind)
    succeeded = traces.filter(pl.col("status") == "ok")
    failed_traces = traces.filter(~pl.col("status").is_in(NOT_FAILURES)).get_column("status").to_list()
    failed_labels = labels.filter(~pl.col("status").is_in(["labelled", "excluded"]))
    failures = failed_traces + [f"labels: {status}" for status in failed_labels["status"]]
    labelled = labels.filter(pl.col("status") == "labelled")
    tested, important = _tokens_by_problem(labelled)
    return LabelCounts(
        kind=kind,
        n_traces=traces.height,
        n_correct=int((succeeded["correct"] == True).sum()),  # noqa: E712 (null = ungraded, neither)
        n_incorrect=int((succeeded["correct"] == False).sum()),  # noqa: E712
        n_excluded=labels.filter(pl.col("status") == "excluded").height,
        n_labelled=labelled.height,
        n_failed_by_status={name: failures.count(name) for name in sorted(set(failures))},
        n_windows=made.height,
        n_flipped=int(made["flipped"].sum() or 0),
        n_tested=int(tested.sum()),
        n_important=int(important.sum()),
        important_share=_important_share(tested, important, rng, draws, level),
    )


def _important_share(
    tested: NDArray[np.float64],
    important: NDArray[np.float64],
    rng: np.random.Generator | None,
    draws: int,
    level: float,
) -> Estimate:
    if tested.size < 2:
        return undefined("fewer than 2 labelled problems")
    counts = cluster_counts(tested.size, draws, rng if rng is not None else np.random.default_rng(0))
    return bootstrap_share(important, tested, counts, level)


def _tokens_by_problem(labelled: pl.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    importance = pl.col("importance")
    sums = (
        labelled.select(
            "problem_id",
            importance.list.eval(pl.element() >= 0).list.sum().alias("tested"),
            importance.list.eval(pl.element() == 1).list.sum().alias("important"),
        )
        .group_by("problem_id")
        .sum()
        .sort("problem_id")
    )
    return sums["tested"].to_numpy().astype(np.float64), sums["important"].to_numpy().astype(np.float64)


def _the_kind(token_labels: pl.DataFrame, kind: str | None) -> str:
    # Not those of the windows: a null intervention has windows but labels no token.
    kinds = sorted(token_labels["kind"].unique().to_list())
    if kind is None and len(kinds) == 1:
        return kinds[0]
    if kind is None:
        raise CfkvError(
            f"token_labels holds {len(kinds)} label kinds ({', '.join(kinds)}); name one as kind="
        )
    if kind not in kinds:
        raise unknown_name("label kind", kind, kinds)
    return kind


def _strongest_rows(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """One within-trace row per (kind, signal): significant before not, then the largest |rho|; NaN comes last."""
    within = frame.filter(pl.col("measure") == "spearman_within").with_columns(
        (pl.col("adjusted_pvalue").fill_nan(2.0) >= SIGNIFICANCE).alias("doubtful"),
        pl.col("estimate").abs().fill_nan(-1.0).alias("strength"),
    )
    strongest_first = (
        within.sort("doubtful", "strength", *COMBINATION, descending=[False, True] + 5 * [False])
        .unique(("kind", "signal"), keep="first", maintain_order=True)
        .sort("kind", "doubtful", "strength", "signal", descending=[False, False, True, False])
    )
    # A kind that has no estimate at all has one row, for its reason.
    barren = pl.col("strength").max().over("kind") < 0
    return strongest_first.filter(~barren | (pl.int_range(pl.len()).over("kind") == 0)).to_dicts()


def _high_damage(frame: pl.DataFrame) -> str:
    graded = [kind for kind in sorted(frame["kind"].unique()) if kind_facts(kind).graded]
    if not graded:
        return ""
    return f" The label of {', '.join(graded)} is high damage: the largest values of each trace."


def _combination(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in COMBINATION)


def _ranged(row: Mapping[str, Any] | None, form: str) -> str:
    if row is None:
        return "-"
    if math.isnan(row["estimate"]):
        return f"none:\n{row['nan_reason']}"
    estimate, low, high = (f"{row[name]:{form}}".replace("0.", ".") for name in ("estimate", "low", "high"))
    return f"{estimate}\n[{low}, {high}]"


def _verdict(pvalue: float) -> str:
    if math.isnan(pvalue):
        return "-"
    text = "< .001" if pvalue < 0.001 else f"{pvalue:.3f}"
    return text if pvalue < SIGNIFICANCE else f"{text} not\nsignificant"
