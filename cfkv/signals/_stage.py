"""`cfkv probe`: traces in, rows of the signals table out, one partition per group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch

from cfkv.config import Execution, ProbeConfig
from cfkv.errors import CfkvError, ItemError, unknown_name
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.selfcheck import number_ranges
from cfkv.schemas import PROBED, SIGNALS
from cfkv.signals._agreement_stage import AGREEMENT, run_agreement
from cfkv.signals._base import TO_END, Signal, signal_kinds
from cfkv.signals._probe import ROWS, SignalValues, needs_cache, probe
from cfkv.stage import Job, Output, Rows, Run, Stage, StageResult
from cfkv.traces.rows import check_same_model, items_in_part, trace_rows
from cfkv.workers import Workers

MEAN_OVER_HEADS = -1
NO_LAYER = -2  # sorts before the embedding; stored as null


def groups() -> dict[str, list[type[Signal]]]:
    """The signals of each group, by name."""
    found: dict[str, list[type[Signal]]] = {}
    for signal in signal_kinds.members():
        found.setdefault(signal.group, []).append(signal)
    return found


def check_groups(config: ProbeConfig) -> dict[str, list[type[Signal]]]:
    """All groups, after checking those that `config` names."""
    known = groups()
    legal = [*known, AGREEMENT]
    if not config.groups:
        raise CfkvError(f"no signal group given; legal: {', '.join(sorted(legal))}")
    for group in config.groups:
        if group not in legal:
            raise unknown_name("signal group", group, legal)
    return known


def run_probe(
    run: Run,
    config: ProbeConfig,
    execution: Execution,
    crew: Workers,
    load: Callable[[], LoadedModel],
    describe: Callable[..., dict[str, Any]],
) -> StageResult:
    """Probe all traces that did not fail; the groups that a part lacks share one pass.

    A group is a stage of its own: re-running one touches no other.
    """
    known = check_groups(config)
    traces = run.require("trace")
    loaded = load()
    check_same_model(traces, loaded)
    members = {group: [signal() for signal in known[group]] for group in config.groups if group != AGREEMENT}
    everything = [signal for group in members.values() for signal in group]
    agreeing = AGREEMENT in config.groups
    caching = agreeing or needs_cache(everything)
    if agreeing or any(ROWS in signal.observes for signal in everything):
        refuse_attention(loaded)
    stages = {group: _stage(group, own, config, loaded, traces) for group, own in members.items()}
    extra = describe(loaded, caching=caching)
    jobs = [
        Job(
            stage,
            run.open_stage(stage, overwrite=execution.overwrite, extra=extra),
            signal_columns(members[group]),
        )
        for group, stage in stages.items()
    ]
    names = {stage.name: group for group, stage in stages.items()}

    def process(index: int, owed: Sequence[Job], advance: Callable[[int], None]) -> list[list[Rows]]:
        run.wait_for("trace", parts=[index], patient=crew.count > 1)
        groups = [names[job.stage.name] for job in owed]
        signals = [signal for group in groups for signal in members[group]]
        values: dict[str, list[Any]] = {group: [] for group in groups}
        status: dict[str, list[Any]] = {group: [] for group in groups}
        for row in trace_rows(run, index):
            advance(1)
            if row["status"] != "ok":
                continue
            found, outcome = _probed(loaded, row, signals, execution)
            for group in groups:
                own = {
                    key: heads for key, heads in found.items() if key[0] in {s.name for s in members[group]}
                }
                values[group] += signal_rows(row["trace_id"], own, per_head=config.per_head)
                entry = {"trace_id": row["trace_id"], "group": group, "n_tokens": len(row["token_ids"])}
                status[group].append({**entry, **outcome})
        return [[values[group], status[group]] for group in groups]

    results = (
        run.execute_jointly(jobs, process, crew, items_of_part=lambda index: items_in_part(traces, index))
        if jobs
        else []
    )
    if agreeing:
        results.append(run_agreement(run, config, execution, crew, loaded, extra))
    run.manifest.record_config("probe", config)
    result = StageResult("probe")
    for part in results:
        result.statuses.update(part.statuses)
        result.parts_written += part.parts_written
        result.parts_found += part.parts_found
    return result


def _probed(
    loaded: LoadedModel, row: Mapping[str, Any], signals: Sequence[Signal], execution: Execution
) -> tuple[SignalValues, dict[str, Any]]:
    """The values of one trace and its status; a failed trace has no values."""
    span = (row["reasoning_start"], row["reasoning_stop"])
    try:
        found = probe(
            loaded,
            row["token_ids"],
            signals,
            chunk_size=execution.chunk_size,
            reasoning=span if None not in span else None,
        )
        return found, {"status": "ok"}
    except ItemError as error:
        return {}, {"status": error.status, "reason": error.reason}
    except torch.OutOfMemoryError as error:
        reason = f"{str(error).splitlines()[0]}; lower --chunk-size"
        return {}, {"status": "out_of_memory", "reason": reason}


def _stage(
    group: str,
    members: Sequence[Signal],
    config: ProbeConfig,
    loaded: LoadedModel,
    traces: Mapping[str, Any],
) -> Stage:
    own: dict[str, Any] = {
        "signals": {signal.name: signal.version for signal in members},
        "model": loaded.identity,
    }
    if any(signal.heads for signal in members):
        own["per_head"] = config.per_head
    return Stage(
        name=f"probe:{group}",
        config=own,
        outputs=(Output(SIGNALS, group), Output(PROBED, group)),
        n_parts=traces["n_parts"],
        n_items=traces["n_items"],
        upstream=("trace",),
    )


def refuse_attention(loaded: LoadedModel) -> None:
    """Raise CfkvError if a layer's attention is more than a softmax over masked dot products."""
    extras = compat.attention_extras(loaded.model)
    if extras:
        what = ", ".join(sorted(set(extras.values())))
        raise CfkvError(
            f"{loaded.name}: attention of layers {number_ranges(sorted(extras))} has {what}, which attention signals "
            "do not compute; probe other groups: hidden, kv, logits, position"
        )


def signal_columns(members: Sequence[Signal]) -> pa.Schema:
    """One list<float32> column per signal; its unit, source and horizon travel as field metadata."""
    return pa.schema(
        [
            pa.field(
                signal.name,
                pa.list_(pa.float32()),
                metadata={
                    "unit": signal.unit,
                    "source": signal.source,
                    "horizon": "end" if signal.horizon == TO_END else str(signal.horizon),
                },
            )
            for signal in members
        ]
    )


def signal_rows(trace_id: str, values: SignalValues, *, per_head: bool = False) -> list[Mapping[str, Any]]:
    """One row per layer with the mean over KV heads of each signal, then, if asked for, one per layer and KV head.

    The layer of signals without layers is null. Rows of one KV head are neighbours, layers ascending, so that a
    signal of a trace is one block of memory.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for (name, layer), heads in values.items():
        by_head = {MEAN_OVER_HEADS: heads.mean(axis=0)}
        if per_head and len(heads) > 1:
            by_head.update(enumerate(heads))
        for head, own in by_head.items():
            place = (head, NO_LAYER if layer is None else layer)
            row = rows.setdefault(place, {"trace_id": trace_id, "layer": layer, "kv_head": head})
            row[name] = own
    return [rows[place] for place in sorted(rows)]
