"""`cfkv correlate`: labels and signals in, rows of the correlations table out."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pyarrow as pa
from pydantic import ValidationError

from cfkv import store
from cfkv.analysis.correlate import correlate
from cfkv.config import CorrelateConfig, Execution
from cfkv.errors import CfkvError
from cfkv.schemas import CORRELATIONS, SIGNALS, TOKEN_LABELS, TRACES
from cfkv.stage import Output, Run, Stage, StageResult
from cfkv.workers import Workers


def upstream_stages(run: Run) -> tuple[str, ...]:
    """The trace stage and all label and probe stages of the run.

    Raises
    ------
    CfkvError
        If there is no label or no signal to correlate.
    """
    names = sorted(run.manifest.read()["stages"])
    for family, command in (("label:", "label"), ("probe:", "probe")):
        if not any(name.startswith(family) for name in names):
            raise CfkvError(f"{run.path} has no {command}s yet; run `cfkv {command} {run.path}` first")
    return ("trace", *(name for name in names if name.startswith(("label:", "probe:"))))


def recorded_config(run: Run) -> CorrelateConfig | None:
    """The configuration that the run's correlations were made with; what an older cfkv did not ask is the default."""
    record = run.manifest.stage("correlate")
    if record is None:
        return None
    try:
        return CorrelateConfig.model_validate(record["identity"]["config"]["correlate"])
    except (ValidationError, KeyError, TypeError):
        return None


def run_correlate(run: Run, config: CorrelateConfig, execution: Execution, *, patient: bool) -> StageResult:
    """Correlate everything that was probed with everything that was labelled; one process does it.

    With `patient`, parts that other processes still have to write are waited for. A correlation whose inputs
    changed is made anew without asking: it costs seconds and is derived.
    """
    upstream = upstream_stages(run)
    for name in upstream:
        run.wait_for(name, patient=patient)
    stage = Stage(
        name="correlate",
        config={"correlate": config.model_dump(mode="json")},
        outputs=(Output(CORRELATIONS),),
        n_parts=1,
        n_items=1,
        version=2,
        upstream=upstream,
    )
    unchanged = recorded_config(run) == config
    mark = run.open_stage(stage, overwrite=execution.overwrite or unchanged)
    run.manifest.record_config("correlate", config)

    def process(index: int, advance: Callable[[int], None]) -> list[pa.Table]:
        groups = store.partition_values(run.path, SIGNALS)  # head agreement is of inputs, not of tokens
        groups = [group for group in groups if f"probe:{group}" in upstream]
        kinds = [name.removeprefix("label:") for name in upstream if name.startswith("label:")]
        frame = correlate(
            store.collect(run.path, TRACES),
            pl.concat([store.collect(run.path, TOKEN_LABELS, kind) for kind in kinds]),
            {group: store.collect(run.path, SIGNALS, group) for group in groups},
            config,
        )
        advance(1)
        return [frame.to_arrow().cast(CORRELATIONS.schema)]

    return run.execute(stage, process, Workers(), mark=mark, items_of_part=lambda index: 1)
