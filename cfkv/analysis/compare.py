"""Policies at real budgets: the accuracy of every arm, and each arm against the full cache and against chance.

Sources: EpiKV and AvoKV-E (accuracy at a budget, cap hits, empty answers), PAGE (paired differences, Wilson);
methods.md 6 and 7. An arm is (mode, policy, parameters, positions, budget).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from cfkv.analysis import _arms
from cfkv.analysis._arms import ARM, FULL
from cfkv.analysis.multiplicity import Correction, adjust
from cfkv.analysis.resampling import bootstrap_mean
from cfkv.schemas import POLICY_ACCURACY, POLICY_COMPARISONS

RANDOM = "random"
SIGNIFICANCE = 0.05
NAN = math.nan
SIMULATED = "eviction is simulated by masks"


def policy_accuracy(
    evaluations: pl.DataFrame,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> pl.DataFrame:
    """What every arm answered, kept and cost.

    Parameters
    ----------
    evaluations : DataFrame
        The table of that name.
    level, draws, seed :
        Of the intervals. Every arm's generator is seeded alike, so that a row does not depend on the others.

    Returns
    -------
    DataFrame
        The table `policy_accuracy`, sorted by its key: one row per arm. `accuracy` is the share of correct rows among
        the graded ones (an unanswered one, and one that the grader gave up on, are graded wrong); a failed row and a
        row without verdict are in neither number, and counted. The unit of the interval is the problem: Wilson's
        where each problem has one graded row, the bootstrap over problems otherwise (`method`; at a share of 0 or 1
        Wilson's of the problems, since no resample differs there). `accuracy_completed` leaves out the rows that were
        stopped at the cap: it flatters whatever rambles, and stands beside the rate of caps for that reason. NaN, or
        null for bytes, where there is no number, with `nan_reason` for accuracy and interval and `cost_reason` for
        seconds and bytes. Seconds are per token that was fed one at a time (`n_steps`); what was read at once is in
        neither. Seconds and bytes of simulated eviction tell nothing and are left out.

    Raises
    ------
    CfkvError
        If a trace has two rows of one arm and sample.
    """
    rows = _arms.prepared(evaluations)
    found = []
    for arm, part in rows.group_by(*ARM, maintain_order=True):
        ran, graded = part.filter("ran"), part.filter("graded")
        completed = graded.filter(pl.col("finish_reason").fill_null("") != "length")
        capped = ran.filter(pl.col("finish_reason") == "length").height
        silent = ran.filter(~pl.col("answered")).height
        estimate, method = _arms.share_estimate(*_arms.per_problem(graded, "score"), level, draws, seed)
        peak = ran["kept_peak"].fill_nan(None).max()
        found.append(
            {
                **dict(zip(ARM, arm, strict=True)),
                **_costs(ran),
                "slots_mean": _arms.mean(part, "slots"),
                "n_rows": part.height,
                "n_graded": graded.height,
                "n_failed": part.filter("failed").height,
                "n_ungraded": part.filter(~pl.col("failed") & ~pl.col("graded")).height,
                "n_items": graded["trace_id"].n_unique(),
                "n_problems": graded["problem_id"].n_unique(),
                "accuracy": estimate.estimate,
                "low": estimate.low,
                "high": estimate.high,
                "level": level,
                "method": method,
                "n_completed": completed.height,
                "accuracy_completed": _arms.mean(completed, "score"),
                "n_ran": ran.height,
                "n_capped": capped,
                "cap_rate": _arms.share(capped, ran.height),
                "n_unanswered": silent,
                "unanswered_rate": _arms.share(silent, ran.height),
                "n_timeouts": ran.filter(pl.col("verdict") == "timeout").height,
                "kept_mean": _arms.mean(ran, "kept_mean"),
                "kept_peak": NAN if peak is None else peak,
                "evictions": _arms.mean(ran, "evictions"),
                "evicted": _arms.mean(ran, "evicted"),
                "nan_reason": estimate.reason,
            }
        )
    return _arms.as_table(POLICY_ACCURACY, found)


def _costs(ran: pl.DataFrame) -> dict[str, Any]:
    """Kind of eviction, seconds per token, bytes, and why one of the latter is missing.

    Rows that evicted nothing say nothing against the kind of the others.
    """
    kinds = sorted(set(ran["eviction"].drop_nulls().to_list()) - {"none"})
    kind = "mixed" if len(kinds) > 1 else kinds[0] if kinds else "none" if ran.height else None
    if "simulated" in kinds:
        return {"eviction": kind, "seconds_per_token": NAN, "cost_reason": SIMULATED}
    timed = ran.filter(pl.col("seconds").is_not_nan() & (pl.col("n_steps") > 0))
    reason = None
    if not ran.height:
        reason = "no row ran"
    elif not timed.height:
        reason = "no token was fed one at a time, or no seconds were recorded"
    seconds = NAN if reason else float(timed["seconds"].cast(pl.Float64).sum()) / int(timed["n_steps"].sum())
    return {
        "eviction": kind,
        "seconds_per_token": seconds,
        "peak_bytes": ran["peak_bytes"].max(),
        "cost_reason": reason,
    }


def policy_comparisons(
    evaluations: pl.DataFrame,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
    *,
    correction: Correction = "holm",
    against: Sequence[str] = (FULL, RANDOM),
) -> pl.DataFrame:
    """Every arm against the full cache, and against random eviction at the same budget, on the same items.

    Parameters
    ----------
    evaluations : DataFrame
        The table of that name.
    level, draws, seed :
        Of the bootstrap over problems.
    correction : str
        holm or benjamini_hochberg, over the policies (with parameters) of one mode, positions, budget and baseline.
        Oracles and controls are among them.
    against : sequence of str
        Baselines. `full` is that of the same mode; any other policy that of the same mode, positions
        and budget.

    Returns
    -------
    DataFrame
        The table `policy_comparisons`, sorted by its key. An item is a trace; with several samples its score is their
        mean. Only items that were graded in both arms enter; those with a failed or ungraded sample in either
        are dropped and counted, as are those of one arm alone. `difference` > 0: the policy is better; wins are the
        items on which it is.
        The p-value is that of the exact McNemar test where each item has one sample and each problem one item: it
        takes items as independent and answers as right or wrong. Otherwise it is NaN with a reason, and the p-value
        is the bootstrap's, `2 min(share <= 0, share >= 0)` with 1 added to both counts; both are kept. Where all
        problems have the same difference the bootstrap says nothing: then it has neither interval nor p.
        A row whose baseline does not exist, or is not unique, says so.

    Raises
    ------
    CfkvError
        If a trace has two rows of one arm and sample, or for an unknown correction.

    References
    ----------
    PAGE, paired differences and p-values; methods.md 7. McNemar: two-sided binomial test of wins among wins + losses.
    """
    scored = _arms.items(_arms.prepared(evaluations))
    arms = dict(iter(scored.group_by(*ARM, maintain_order=True)))
    found = []
    for arm, part in arms.items():
        mode, policy, _, positions, budget = arm
        for baseline in against:
            if policy in (FULL, baseline):
                continue
            same = [
                name
                for name in arms
                if name[:2] == (mode, baseline) and (baseline == FULL or name[3:] == (positions, budget))
            ]
            # Several settings of one baseline: the one with its defaults.
            same = [name for name in same if name[2] == ""] or same
            row = {**dict(zip(ARM, arm, strict=True)), "against": baseline, "level": level}
            if len(same) == 1:
                row |= _paired(part, arms[same[0]], level, draws, seed)
            else:
                where = "" if baseline == FULL else " at this budget"
                row |= _unpaired(f"{'several arms' if same else 'no arm'} {baseline}{where} in this mode")
            found.append(row)
    return _arms.as_table(POLICY_COMPARISONS, _corrected(found, correction))


_COUNTS = ("n_items", "n_problems", "n_dropped", "n_unshared", "wins", "losses", "ties")
_NUMBERS = (
    *("accuracy", "accuracy_against", "difference", "low", "high"),
    *("mcnemar_pvalue", "bootstrap_pvalue", "pvalue"),
)


def _unpaired(reason: str, **counts: int) -> dict[str, Any]:
    return {
        **dict.fromkeys(_COUNTS, 0),
        **dict.fromkeys(_NUMBERS, NAN),
        **counts,
        "test": "none",
        "mcnemar_reason": reason,
        "nan_reason": reason,
    }


def _paired(one: pl.DataFrame, other: pl.DataFrame, level: float, draws: int, seed: int) -> dict[str, Any]:
    """The measures of one arm against another, from their items."""
    columns = ["trace_id", "complete", "n_samples", "score"]
    both = one.select("problem_id", *columns).join(other.select(columns), on="trace_id", suffix="_against")
    used = both.filter(pl.col("complete") & pl.col("complete_against"))
    counts = {
        "n_dropped": both.height - used.height,
        "n_unshared": one.height + other.height - 2 * both.height,
    }
    if not used.height:
        return _unpaired("no item was graded in both arms", **counts)
    # Sixths and thirds must tie exactly.
    used = used.with_columns(difference=(pl.col("score") - pl.col("score_against")).round(9))
    difference = used["difference"]
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    sums, sizes = _arms.per_problem(used, "difference")
    n_problems = sums.size
    row: dict[str, Any] = {
        **counts,
        "n_items": used.height,
        "n_problems": n_problems,
        "accuracy": _arms.mean(used, "score"),
        "accuracy_against": _arms.mean(used, "score_against"),
        "difference": float(difference.to_numpy().mean()),
        "wins": wins,
        "losses": losses,
        "ties": used.height - wins - losses,
    }
    reason = None
    if n_problems < 2:
        reason = "fewer than 2 problems"
    elif np.ptp(sums / sizes) < 1e-12:
        reason = _arms.SAME_EVERYWHERE
    if reason:
        row |= {"low": NAN, "high": NAN, "bootstrap_pvalue": NAN, "nan_reason": reason}
    else:
        drawn = bootstrap_mean(sums, sizes, draws, np.random.default_rng(seed), level, null=0.0)
        row |= {"low": drawn.low, "high": drawn.high, "bootstrap_pvalue": drawn.pvalue}
    return row | _verdict(row, used)


def _verdict(row: dict[str, Any], used: pl.DataFrame) -> dict[str, Any]:
    """McNemar's p where the items allow it, and which p-value speaks for the row."""
    if used.filter((pl.col("n_samples") > 1) | (pl.col("n_samples_against") > 1)).height:
        reason = "several samples per item"
    elif row["n_problems"] < row["n_items"]:
        reason = "several items per problem"
    else:
        exact = mcnemar_pvalue(row["wins"], row["losses"])
        return {"mcnemar_pvalue": exact, "test": "mcnemar", "pvalue": exact}
    drawn = row["bootstrap_pvalue"]
    test = "none" if math.isnan(drawn) else "bootstrap"
    return {"mcnemar_pvalue": NAN, "mcnemar_reason": reason, "test": test, "pvalue": drawn}


def mcnemar_pvalue(wins: int, losses: int) -> float:
    """Exact two-sided p of McNemar's test: is one of two paired answers right more often than the other?

    Parameters
    ----------
    wins, losses : int
        Items that only the first, and only the second answers right; ties carry no information.

    Returns
    -------
    float
        `2 P(X <= min(wins, losses))` for X ~ Binomial(wins + losses, 1/2), at most 1; 1 without wins and losses.

    Raises
    ------
    ValueError
        For negative counts.
    """
    from scipy.stats import binomtest

    if min(wins, losses) < 0:
        raise ValueError(f"wins = {wins}, losses = {losses}: counts are not negative")
    if wins + losses == 0:
        return 1.0
    return float(binomtest(wins, wins + losses, 0.5).pvalue)


def _corrected(rows: list[dict[str, Any]], correction: Correction) -> Iterator[dict[str, Any]]:
    """The rows with p-values adjusted within mode, budget and baseline."""
    families: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    adjust([], correction)  # an unknown one is refused even if there is nothing to correct
    for row in rows:
        family = tuple(row[name] for name in ("mode", "positions", "budget", "against"))
        families.setdefault(family, []).append(row)
    for members in families.values():
        pvalues = np.array([row["pvalue"] for row in members])
        made = int((~np.isnan(pvalues)).sum())
        for row, adjusted in zip(members, adjust(pvalues, correction), strict=True):
            yield row | {"adjusted_pvalue": float(adjusted), "correction": correction, "n_tests": made}
