"""`cfkv label`: correct traces in, rows of the kind's own table and of token_labels out.

Part k of the labels is made from part k of the traces, so that a process can go on as soon as that part is
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cfkv import store
from cfkv.answers import matcher
from cfkv.config import Execution, LabelConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.labels._base import LabelTrace, label_kinds
from cfkv.models.loading import LoadedModel
from cfkv.schemas import TOKEN_LABELS, TRACES
from cfkv.stage import Output, Rows, Run, Stage, StageResult
from cfkv.traces.rows import check_same_model, items_in_part, trace_rows
from cfkv.traces.stage import absolute
from cfkv.workers import Workers


def run_label(
    run: Run,
    config: LabelConfig,
    execution: Execution,
    crew: Workers,
    load: Callable[[], LoadedModel],
    describe: Callable[[LoadedModel], dict[str, Any]],
) -> StageResult:
    """Label the correct traces that this process owns and that are not labelled yet.

    Raises
    ------
    CfkvError
        If no trace of the whole run is correct.
    """
    kind = label_kinds.get(config.kind)
    traces = run.require("trace")
    loaded = load()
    check_same_model(traces, loaded)
    stage = Stage(
        name=f"label:{config.kind}",
        config={"label": kind.settings(config), "model": loaded.identity},
        outputs=(Output(kind.table, config.kind), Output(TOKEN_LABELS, config.kind)),
        n_parts=traces["n_parts"],
        n_items=traces["n_items"],
        version=kind.version,
        upstream=("trace",),
    )
    label = kind(loaded, config, execution, matcher(config.answer_match))
    mark = run.open_stage(stage, overwrite=execution.overwrite, extra=describe(loaded))
    run.manifest.record_config("label", absolute(config, "candidates", ("all", "stratified")))

    def process(index: int, advance: Callable[[int], None]) -> list[Rows]:
        run.wait_for("trace", parts=[index], patient=crew.count > 1)
        interventions: list[Any] = []
        tokens: list[Any] = []
        for row in trace_rows(run, index):
            advance(1)
            if not row["correct"]:
                continue
            try:
                labelled = label.label(LabelTrace.from_row(row))
                interventions += labelled.rows
                tokens.append(labelled.tokens)
            except ItemError as error:
                tokens.append(failure(row, config.kind, error.status, error.reason))
            except torch.OutOfMemoryError as error:
                reason = f"{str(error).splitlines()[0]}; lower --memory-gib or --chunk-size"
                tokens.append(failure(row, config.kind, "out_of_memory", reason))
        return [interventions, tokens]

    result = run.execute(
        stage,
        process,
        crew,
        mark=mark,
        items_of_part=lambda index: items_in_part(traces, index),
    )
    if not run.missing_parts("trace"):
        result.note = note_on_traces(run, result)
    return result


def failure(row: dict[str, Any], kind: str, status: str, reason: str) -> dict[str, Any]:
    """The token_labels row of a trace that could not be labelled."""
    return {
        "trace_id": row["trace_id"],
        "problem_id": row["problem_id"],
        "kind": kind,
        "n_windows": 0,
        "status": status,
        "reason": reason,
    }


def note_on_traces(run: Run, result: StageResult) -> str:
    """How many traces were left out for their answer, and where a reason for exclusions is.

    Raises
    ------
    CfkvError
        If no trace at all is correct.
    """
    frame = store.scan(run.path, TRACES).select("status", "correct").collect()
    ok = frame.filter(frame["status"] == "ok")
    if ok["correct"].sum() == 0:
        raise CfkvError(
            f"{run.path}: none of {len(frame)} traces is correct ({len(ok)} without failure), and only correct "
            "traces can be labelled; look at `answer` and `reference_answer` in the traces table, and at the "
            "model, --answer-match or --max-new-tokens"
        )
    notes = []
    incorrect = len(ok) - int(ok["correct"].sum())
    if incorrect:
        notes.append(f"not labelled, since the answer is wrong: {incorrect}")
    if result.statuses["excluded"]:
        notes.append("excluded: the answer from the unmodified context differs, see `reason` in token_labels")
    return "".join(f"\n  {note}" for note in notes)
