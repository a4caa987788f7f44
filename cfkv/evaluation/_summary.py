"""The summary of all judged policies of a run: rows of validity_summary."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pyarrow as pa

from cfkv import store
from cfkv.analysis.validity_summary import summarise
from cfkv.config import OfflineConfig
from cfkv.errors import CfkvError
from cfkv.evaluation.offline import FAMILY, recorded_names, stage_name
from cfkv.schemas import POLICY_VALIDITY, VALIDITY_SUMMARY
from cfkv.stage import Output, Run, Stage, StageResult
from cfkv.workers import Workers

NAME = "validity"


def judged_policies(run: Run) -> list[str]:
    """Policies whose rows are all there, fit the labels of now, and were judged as `random` was, sorted."""
    found, stages = [], run.manifest.read()["stages"]
    common = stages[stage_name("random")]["identity"]["config"]["offline"]
    for name in sorted(stages):
        if not name.startswith(f"{FAMILY}:") or stages[name]["identity"]["config"]["offline"] != common:
            continue
        try:
            if not run.missing_parts(name):
                found.append(name.removeprefix(f"{FAMILY}:"))
        except CfkvError:
            continue  # made from earlier labels; judging it again is its own command's to ask for
    return found


def run_summary(run: Run, config: OfflineConfig, *, patient: bool) -> StageResult:
    """Sum up all judged policies, those of earlier commands included; one process does it.

    With `patient`, parts that other processes still have to write are waited for. A summary whose inputs changed is
    made anew without asking: it costs seconds and is derived.
    """
    for name in recorded_names(run, config):
        run.wait_for(name, patient=patient)
    texts = judged_policies(run)
    stage = Stage(
        name=NAME,
        config={"validity": config.model_dump(mode="json", include={"draws", "level", "correction", "seed"})},
        outputs=(Output(VALIDITY_SUMMARY),),
        n_parts=1,
        n_items=1,
        upstream=tuple(stage_name(text) for text in texts),
    )
    mark = run.open_stage(stage, overwrite=True)

    def process(index: int, advance: Callable[[int], None]) -> list[pa.Table]:
        frame = summarise(
            pl.concat([store.collect(run.path, POLICY_VALIDITY, text) for text in texts]), config
        )
        advance(1)
        return [frame.to_arrow().cast(VALIDITY_SUMMARY.schema)]

    return run.execute(stage, process, Workers(), mark=mark, items_of_part=lambda index: 1)
