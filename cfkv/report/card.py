"""The dataset card of a run: README.md with one `configs:` entry per table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from cfkv.schemas import TABLES


def dataset_card(run: Path, manifest: Mapping[str, Any], traces: pl.DataFrame) -> str:
    """Front matter that `datasets.load_dataset(DIR, TABLE)` reads, and what the tables hold."""
    present = [name for name in TABLES if any((run / name).rglob("part-*.parquet"))]
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
    listed = "\n".join(f"- `{name}`: one row per {', '.join(TABLES[name].key)}" for name in present)
    return (
        f"---\n{front}---\n\n# cfkv run {run.resolve().name}\n\n"
        f"{len(traces)} traces of {models or 'no model'} on {datasets or 'no dataset'}, made by cfkv "
        f"{manifest.get('cfkv_version', 'unknown')}.\n\n{listed}\n\n"
        '```python\nimport cfkv\n\nrun = cfkv.load(".")\nrun.token_labels.collect()\n```\n\n'
        "`run.json` holds configurations, fingerprints, library versions and the model's self-check; "
        "`report.html` shows what was found.\n"
    )
