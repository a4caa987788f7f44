"""The dataset card of a run: README.md with one `configs:` entry per table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import yaml

from cfkv.schemas import TABLES

HOLDS = {
    "evaluations": "what a policy answered at a budget; `slots` are tokens per KV head, all protected ones included",
    "keep_sets": "positions that are left after an eviction; layer or kv_head -1: shared",
    "policy_accuracy": "accuracy of a policy at a budget with its interval, what it kept and cost",
    "policy_comparisons": "the same against the full cache and against random, on the traces that both answered",
    "lossless_budgets": "the smallest budget from which on a trace keeps its answer",
    "offline_online": "rank correlation over policies of an offline measure with accuracy",
}


def dataset_card(run: Path, manifest: Mapping[str, Any], traces: pl.DataFrame) -> str:
    """Front matter that `datasets.load_dataset(DIR, TABLE)` reads, and what the tables hold."""
    present = [name for name in TABLES if _has_rows(run / name)]
    configs: list[dict[str, Any]] = [
        {"config_name": name, "data_files": [{"split": "train", "path": f"{name}/**/part-*.parquet"}]}
        for name in present
        if name != "signals"
    ]
    groups = sorted(path.name.partition("=")[2] for path in (run / "signals").glob("group=*"))
    configs += [
        {
            "config_name": f"signals_{group}",
            "data_files": [{"split": "train", "path": f"signals/group={group}/part-*.parquet"}],
        }
        for group in groups
    ]
    for entry in configs[:1]:
        entry["default"] = True
    front = yaml.safe_dump(
        {"pretty_name": f"cfkv run {run.resolve().name}", "configs": configs}, sort_keys=False
    )
    models = ", ".join(
        f"{row['model']} ({row['weights']})" for row in traces.select("model", "weights").unique().to_dicts()
    )
    datasets = ", ".join(sorted(traces["dataset"].unique().to_list()))
    listed = "\n".join(
        f"- `{name}`: one row per {', '.join(TABLES[name].key)}"
        + (f"; {HOLDS[name]}" if name in HOLDS else "")
        for name in present
    )
    return (
        f"---\n{front}---\n\n# cfkv run {run.resolve().name}\n\n"
        f"{len(traces)} traces of {models or 'no model'} on {datasets or 'no dataset'}, made by cfkv "
        f"{manifest.get('cfkv_version', 'unknown')}.\n\n{listed}\n\n"
        '```python\nimport cfkv\n\nrun = cfkv.load(".")\nrun.token_labels.collect()\n```\n\n'
        "`run.json` holds configurations, fingerprints, library versions and the model's self-check; "
        "`report.html` shows what was found.\n"
    )


def _has_rows(folder: Path) -> bool:
    """Whether some part has a row: a table without one, such as keep sets that nobody asked for, cannot be loaded."""
    return any(pq.read_metadata(path).num_rows for path in folder.rglob("part-*.parquet"))
