"""The content of the table: figures and evidence of all rows as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cfkv import __version__
from cfkv.analysis.intervals import Estimate
from cfkv.labels.eviction_kl import BOUNDARY
from cfkv.truth import truth_score
from pipelines.truth_table import evidence
from pipelines.truth_table.runs import ROWS, SEED, Row
from pipelines.truth_table.scores import (
    DRAWS,
    Planted,
    flips_as_planted,
    perfect_labels,
    planted_traces,
    pooled_auroc,
)


def build(folder: Path, made: int, rows: Sequence[Row] = ROWS) -> dict[str, Any]:
    """Everything that is written to the JSON file."""
    return {
        "command": f"python -m pipelines.truth_table RUN_FOLDER --traces {made}",
        "model": "builtin",
        "seed": SEED,
        "traces": made,
        "interval": f"95 %, percentiles of {DRAWS} bootstrap draws of traces",
        "cfkv": __version__,
        "rows": [row_figures(folder, row) for row in rows],
    }


def row_figures(folder: Path, row: Row) -> dict[str, Any]:
    """One line: figures with intervals, then the evidence."""
    run = folder / row.folder
    score = truth_score(run, row.kind)
    if score is None:
        raise ValueError(f"{run} has no labelled registers trace")
    traces = planted_traces(run, row.kind)
    windows = row.kind != "eviction_kl"
    figures: dict[str, Any] = {
        "kind": row.kind,
        "setting": row.setting,
        "truth": score.truth,
        "traces": score.n_traces,
        "tokens": int(sum(_tested(trace).sum() for trace in traces)),
        "load_bearing": score.n_bearing,
        "load_bearing_untested": score.n_untested,
        "off_facts": score.n_off,
        "auroc_label": interval(score.label_auroc),
        "auroc_value": interval(score.value_auroc),
        "recall": interval(score.recall),
        "recall_at_most": rounded(score.ceiling),
        "labelled_off_facts": interval(score.off_facts),
    }
    if not windows:
        return figures | {"evidence": _of_removals(run, traces, at_end=row.config.steps == BOUNDARY)}
    size, stride = row.config.window, row.config.stride
    bearing = [trace.bearing(row.kind) for trace in traces]
    perfect = [perfect_labels(row.kind, each, size, stride) for each in bearing]
    figures["auroc_label_with_perfect_flips"] = interval(pooled_auroc(perfect, bearing))
    figures["flips_as_planted"] = interval(flips_as_planted(run, row.kind, traces))
    labels = np.concatenate([trace.importance[_tested(trace)] for trace in traces])
    found: dict[str, Any] = {
        "labelled_share": float(labels.mean()),
        "load_bearing_share": float(np.concatenate(bearing).mean()),
    }
    if size == 1:
        found["effect_by_part"] = evidence.by_part(traces)
    if row.kind == "truncation":
        found["by_position"] = evidence.by_position(traces)
    return figures | {"evidence": rounded(found)}


def _of_removals(run: Path, traces: Sequence[Planted], *, at_end: bool) -> dict[str, Any]:
    found = evidence.removals(run, traces)
    told: dict[str, Any] = {"removals": len(found), "by_removed_token": evidence.by_role(found)}
    if at_end:
        told["effect_by_part"] = evidence.by_part(traces)
        return rounded(told)
    reaching = [each for each in found if each.at_answer]
    ending = [each for each in found if not each.at_answer]
    return rounded(
        told
        | {
            "by_distance": evidence.by_distance(found),
            "kl_per_written_token": {
                role: evidence.by_written(found, role) for role in ("fused fact", "fact digit", "tag")
            },
            "auroc_horizon_reaches_answer": evidence.auroc_of(reaching, len(traces)),
            "auroc_horizon_ends_before": evidence.auroc_of(ending, len(traces)),
        }
    )


def _tested(trace: Planted) -> Any:
    return (trace.importance >= 0) | np.isfinite(trace.value)


def interval(estimate: Estimate) -> dict[str, Any]:
    """Estimate and bounds to four decimals, None where there is none."""
    return {
        name: None if np.isnan(getattr(estimate, name)) else round(float(getattr(estimate, name)), 4)
        for name in ("estimate", "low", "high")
    }


def rounded(content: Any) -> Any:
    """All floats to four significant digits, NaN to None."""
    if isinstance(content, dict):
        return {key: rounded(each) for key, each in content.items()}
    if isinstance(content, list | tuple):
        return [rounded(each) for each in content]
    if isinstance(content, float):
        return None if np.isnan(content) else float(f"{content:.4g}")
    return content
