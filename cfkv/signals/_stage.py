"""`cfkv probe`: traces in, rows of the signals table out, one partition per group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch

from cfkv.config import Execution, ProbeConfig
from cfkv.errors import CfkvError, ItemError, unknown_name
from cfkv.models.loading import LoadedModel
from cfkv.schemas import PROBED, SIGNALS
from cfkv.signals._base import Signal, signal_kinds
from cfkv.signals._probe import SignalValues, probe
from cfkv.stage import Output, Rows, Run, Stage, StageResult
from cfkv.traces.rows import check_same_model, items_in_part, trace_rows
from cfkv.workers import Workers

MEAN_OVER_HEADS = -1


def groups() -> dict[str, list[type[Signal]]]:
    """The signals of each group, by name."""
    found: dict[str, list[type[Signal]]] = {}
    for signal in signal_kinds.members():
        found.setdefault(signal.group, []).append(signal)
    return found


def check_groups(config: ProbeConfig) -> dict[str, list[type[Signal]]]:
    """All groups, after checking those that `config` names."""
    known = groups()
    if not config.groups:
        raise CfkvError(f"no signal group given; legal: {', '.join(sorted(known))}")
    for group in config.groups:
        if group not in known:
            raise unknown_name("signal group", group, known)
    return known


def run_probe(
    run: Run,
    config: ProbeConfig,
    execution: Execution,
    crew: Workers,
    load: Callable[[], LoadedModel],
    describe: Callable[[LoadedModel], dict[str, Any]],
) -> StageResult:
    """Probe all traces that did not fail, once per group.

    A group is a stage of its own: re-running one touches no other.
    """
    known = check_groups(config)
    result = StageResult("probe")
    for group in config.groups:
        members = [signal() for signal in known[group]]
        part = _run_group(run, group, members, execution, crew, load, describe)
        result.statuses.update(part.statuses)
        result.parts_written += part.parts_written
        result.parts_found += part.parts_found
    run.manifest.record_config("probe", config)
    return result


def _run_group(
    run: Run,
    group: str,
    members: Sequence[Signal],
    execution: Execution,
    crew: Workers,
    load: Callable[[], LoadedModel],
    describe: Callable[[LoadedModel], dict[str, Any]],
) -> StageResult:
    traces = run.require("trace")
    loaded = load()
    check_same_model(traces, loaded)
    stage = Stage(
        name=f"probe:{group}",
        config={"signals": {signal.name: signal.version for signal in members}, "model": loaded.identity},
        outputs=(Output(SIGNALS, group), Output(PROBED, group)),
        n_parts=traces["n_parts"],
        n_items=traces["n_items"],
        upstream=("trace",),
    )
    mark = run.open_stage(stage, overwrite=execution.overwrite, extra=describe(loaded))

    def process(index: int, advance: Callable[[int], None]) -> list[Rows]:
        run.wait_for("trace", parts=[index], patient=crew.count > 1)
        values: list[Any] = []
        status: list[Any] = []
        for row in trace_rows(run, index):
            advance(1)
            if row["status"] != "ok":
                continue
            entry = {"trace_id": row["trace_id"], "group": group, "n_tokens": len(row["token_ids"])}
            try:
                found = probe(loaded, row["token_ids"], members, chunk_size=execution.chunk_size)
                values += signal_rows(row["trace_id"], found)
                status.append({**entry, "status": "ok"})
            except ItemError as error:
                status.append({**entry, "status": error.status, "reason": error.reason})
            except torch.OutOfMemoryError as error:
                reason = f"{str(error).splitlines()[0]}; lower --chunk-size"
                status.append({**entry, "status": "out_of_memory", "reason": reason})
        return [values, status]

    return run.execute(
        stage,
        process,
        crew,
        mark=mark,
        items_of_part=lambda index: items_in_part(traces, index),
        extra_columns=signal_columns(members),
    )


def signal_columns(members: Sequence[Signal]) -> pa.Schema:
    """One list<float32> column per signal; its unit, source and horizon travel as field metadata."""
    return pa.schema(
        [
            pa.field(
                signal.name,
                pa.list_(pa.float32()),
                metadata={"unit": signal.unit, "source": signal.source, "horizon": str(signal.horizon)},
            )
            for signal in members
        ]
    )


def signal_rows(trace_id: str, values: SignalValues) -> list[Mapping[str, Any]]:
    """One row per layer, with the mean over KV heads of each signal."""
    rows: dict[int, dict[str, Any]] = {}
    for (name, layer), heads in values.items():
        row = rows.setdefault(layer, {"trace_id": trace_id, "layer": layer, "kv_head": MEAN_OVER_HEADS})
        row[name] = heads.mean(axis=0)
    return [rows[layer] for layer in sorted(rows)]
