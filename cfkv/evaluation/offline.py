"""`cfkv evaluate offline`: labels and policies in, rows of policy_validity out, one partition per policy.

All policies of a command share one pass over each trace; those whose score is final at a token's birth are read off
stored signals instead, where the run has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from cfkv import store
from cfkv.config import Execution, OfflineConfig
from cfkv.errors import ItemError
from cfkv.evaluation._labels import LabelledTrace, labelled_kinds, labelled_traces
from cfkv.evaluation._names import named_policies
from cfkv.evaluation._validity import (
    SIGNAL_GROUPS,
    FromModel,
    FromSignals,
    Judged,
    Source,
    check_columns,
    judge_trace,
    signal_groups,
    trace_seed,
)
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import Policy
from cfkv.schemas import JUDGED, POLICY_VALIDITY, PROBED, SIGNALS
from cfkv.stage import Job, Output, Rows, Run, Stage, StageResult
from cfkv.traces.rows import check_same_model, items_in_part
from cfkv.workers import Workers

FAMILY = "evaluate offline"


def stage_name(text: str) -> str:
    """The stage of one policy; up to the colon it is the command that writes it."""
    return f"{FAMILY}:{text}"


@dataclass
class Judge:
    """Policies, by text, on the traces of one run.

    stored : groups of signals that each policy is judged from; the policies that are not there need the model.
    """

    run: Run
    config: OfflineConfig
    kinds: list[str]
    policies: dict[str, Policy]
    stored: dict[str, frozenset[str]]
    sizes: tuple[int, int]
    loaded: LoadedModel | None = None
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        run: Run,
        config: OfflineConfig,
        policies: Mapping[str, Policy],
        load: Callable[[], LoadedModel],
        *,
        overwrite: bool = False,
    ) -> Judge:
        """Choose where each policy's scores come from; the model is loaded only if some policy needs it."""
        traces = run.require("trace")
        kinds = labelled_kinds(run, config.kinds)
        stored, sizes = stored_policies(run, traces, policies)
        for text in [] if overwrite else list(stored):
            record = run.manifest.stage(stage_name(text))
            if record is not None and "model" in record["identity"]["config"]:
                del stored[text]  # it was begun with the model, and is finished so
        judge = cls(run, config, kinds, dict(policies), stored, sizes)
        needing = {text: policy for text, policy in policies.items() if text not in stored}
        if needing:
            judge.loaded = load()
            check_same_model(traces, judge.loaded)
            judge.left_out = check_columns(judge.loaded, needing, config.policies)
            for text in judge.left_out:
                del judge.policies[text]
        return judge

    def upstream(self, text: str) -> tuple[str, ...]:
        """The stages that a policy's rows are made from."""
        groups = sorted(self.stored.get(text, ()))
        return ("trace", *(f"label:{kind}" for kind in self.kinds), *(f"probe:{group}" for group in groups))

    def trace(
        self, index: int, trace: LabelledTrace, texts: Sequence[str], execution: Execution
    ) -> dict[str, Judged]:
        """Judge policies on one trace of part `index`."""
        seed = trace_seed(self.config.seed, trace.trace_id)
        found: dict[str, Judged] = {}
        reading = {text: self.policies[text] for text in texts if text not in self.stored}
        if reading and self.loaded is not None:
            loaded, stop = self.loaded, max(trace.step(name) for name in self.config.checkpoints)

            def from_model() -> Source:
                return FromModel(loaded, reading, trace, stop, chunk_size=execution.chunk_size, seed=seed)

            found |= judge_trace(from_model, reading, trace, self.config)
        by_groups: dict[frozenset[str], dict[str, Policy]] = {}
        for text in texts:
            if text in self.stored:
                by_groups.setdefault(self.stored[text], {})[text] = self.policies[text]
        for groups, members in by_groups.items():

            def from_signals(
                groups: frozenset[str] = groups, members: Mapping[str, Policy] = members
            ) -> Source:
                names = {name for policy in members.values() for name in policy.observes}
                columns = stored_columns(self.run, index, trace, sorted(groups), names)
                return FromSignals(members, trace, columns, self.sizes, seed)

            found |= judge_trace(from_signals, members, trace, self.config)
        return found


def run_offline(
    run: Run,
    config: OfflineConfig,
    execution: Execution,
    crew: Workers,
    load: Callable[[], LoadedModel],
    describe: Callable[[LoadedModel], dict[str, Any]],
) -> StageResult:
    """Judge the policies on the labelled traces of the parts that this process owns and that are not judged yet.

    A policy is a stage of its own: judging another one later touches none.
    """
    policies = named_policies(config.policies)
    judge = Judge.of(run, config, policies, load, overwrite=execution.overwrite)
    traces = run.require("trace")
    extra = {} if judge.loaded is None else describe(judge.loaded)
    jobs = []
    for text in judge.policies:
        stage = _stage(judge, text, traces)
        own = {} if text in judge.stored else extra
        jobs.append(Job(stage, run.open_stage(stage, overwrite=execution.overwrite, extra=own)))
    names = {stage_name(text): text for text in judge.policies}

    def process(index: int, owed: Sequence[Job], advance: Callable[[int], None]) -> list[list[Rows]]:
        for upstream in sorted({name for job in owed for name in job.stage.upstream}):
            run.wait_for(upstream, parts=[index], patient=crew.count > 1)
        texts = [names[job.stage.name] for job in owed]
        rows: dict[str, list[Any]] = {text: [] for text in texts}
        status: dict[str, list[Any]] = {text: [] for text in texts}
        labelled = labelled_traces(run, index, judge.kinds, config.high_damage)
        advance(items_in_part(traces, index) - len(labelled))
        for trace in labelled:
            found = judge.trace(index, trace, texts, execution)
            for text in texts:
                rows[text] += found[text].rows
                entry = {"trace_id": trace.trace_id, "policy": text, "n_tokens": len(trace.token_ids)}
                status[text].append({**entry, "status": found[text].status, "reason": found[text].reason})
            advance(1)
        return [[rows[text], status[text]] for text in texts]

    parts = run.execute_jointly(jobs, process, crew, items_of_part=lambda index: items_in_part(traces, index))
    run.manifest.record_config("offline", config)
    result = StageResult(FAMILY)
    for part in parts:
        result.statuses.update(part.statuses)
        result.parts_written += part.parts_written
        result.parts_found += part.parts_found
    result.note = _note(judge)
    return result


def _stage(judge: Judge, text: str, traces: Mapping[str, Any]) -> Stage:
    config, policy = judge.config, judge.policies[text]
    own: dict[str, Any] = {
        "offline": config.model_dump(mode="json", include={"checkpoints", "budgets", "high_damage", "seed"})
        | {"kinds": judge.kinds},
        "policy": {"text": text, "version": policy.version},
    }
    if text not in judge.stored and judge.loaded is not None:
        own["model"] = judge.loaded.identity
    return Stage(
        name=stage_name(text),
        config=own,
        outputs=(Output(POLICY_VALIDITY, text), Output(JUDGED, text)),
        n_parts=traces["n_parts"],
        n_items=traces["n_items"],
        upstream=judge.upstream(text),
    )


def _note(judge: Judge) -> str:
    stored = sum(text in judge.stored for text in judge.policies)
    reading = len(judge.policies) - stored
    parts = [f"{stored} from stored signals and labels alone"] if stored else []
    parts += [f"{reading} in one pass of the model over each trace"] if reading else []
    note = f"\n  {len(judge.policies)} policies judged: {', '.join(parts)}"
    if judge.left_out:
        note += f"\n  left out, since the model does not show them attention: {', '.join(judge.left_out)}"
    return note


def stored_policies(
    run: Run, traces: Mapping[str, Any], policies: Mapping[str, Policy]
) -> tuple[dict[str, frozenset[str]], tuple[int, int]]:
    """Policies that the run's signals are enough for, with their groups, and the model's layers and KV heads."""
    model = traces.get("model", {})
    sizes = (model.get("num_layers", 0), model.get("num_kv_heads", 0))
    stages = run.manifest.read()["stages"]
    found = {}
    for text, policy in policies.items():
        per_head = sizes[1] == 1 or _keeps_heads(stages)
        groups = signal_groups(policy, per_head=per_head)
        if groups is None or (groups and not all(sizes)):
            continue
        if all(f"probe:{group}" in stages for group in groups) and _has(run, groups, policy.observes):
            found[text] = groups
    return found, sizes


def _keeps_heads(stages: Mapping[str, Any]) -> bool:
    return bool(stages.get("probe:kv", {}).get("identity", {}).get("config", {}).get("per_head"))


def _has(run: Run, groups: frozenset[str], names: Sequence[str]) -> bool:
    """Whether the groups' parts are all there, with these signals."""
    signals = {
        name
        for group in groups
        for name in run.require(f"probe:{group}")["identity"]["config"].get("signals", ())
    }
    return set(names) <= signals and not any(run.missing_parts(f"probe:{group}") for group in groups)


def stored_columns(
    run: Run, index: int, trace: LabelledTrace, groups: Sequence[str], names: set[str]
) -> dict[str, Tensor]:
    """Observed columns of one trace from its stored signals: [L, N], or [L, G or 1, N] of those with heads.

    The first token has no hidden_diff; a policy sees 0 there.

    Raises
    ------
    ItemError
        If the trace was not probed.
    """
    found = {}
    for group in groups:
        path = store.part_path(run.path, PROBED, group, index)
        probed = pl.DataFrame(pl.from_arrow(store.read_part(path, PROBED)))
        own = probed.filter(pl.col("trace_id") == trace.trace_id)
        if own.is_empty() or own["status"][0] != "ok":
            status = "absent" if own.is_empty() else own["status"][0]
            raise ItemError("not_probed", f"its signals of group {group} are missing: {status}")
        wanted = [name for name in sorted(names) if SIGNAL_GROUPS[name] == group]
        path = store.part_path(run.path, SIGNALS, group, index)
        content = store.read_part(path, SIGNALS, ["trace_id", "layer", "kv_head", *wanted])
        rows = pl.DataFrame(pl.from_arrow(content)).filter(
            (pl.col("trace_id") == trace.trace_id) & (pl.col("layer") >= 0)
        )
        for name in wanted:
            found[name] = _column(rows.drop_nulls(name).sort("layer", "kv_head"), name)
    return found


def _column(rows: pl.DataFrame, name: str) -> Tensor:
    heads = rows["kv_head"].unique()
    kept = rows.filter(pl.col("kv_head") >= 0) if len(heads) > 1 else rows
    values = np.array(kept[name].to_list(), dtype=np.float32)
    column = torch.from_numpy(values).nan_to_num(0.0)
    return column if name == "hidden_diff" else column.unflatten(0, (kept["layer"].n_unique(), -1))


def recorded_names(run: Run, config: OfflineConfig) -> list[str]:
    """The stages of a configuration's policies that the run records: all but those that the model had to leave out."""
    recorded = run.manifest.read()["stages"]
    return [name for name in map(stage_name, named_policies(config.policies)) if name in recorded]
