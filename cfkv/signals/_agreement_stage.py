"""The probe stage `agreement`: one input per trace, rows of head_agreement and gate_signals out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from cfkv.config import Execution, ProbeConfig
from cfkv.errors import ItemError
from cfkv.models.loading import LoadedModel
from cfkv.schemas import GATE_SIGNALS, HEAD_AGREEMENT
from cfkv.signals._agreement import gate_signals
from cfkv.signals._last_rows import agreement_profile
from cfkv.stage import Output, Rows, Run, Stage, StageResult
from cfkv.traces.rows import items_in_part, trace_rows
from cfkv.workers import Workers

AGREEMENT = "agreement"


def run_agreement(
    run: Run,
    config: ProbeConfig,
    execution: Execution,
    crew: Workers,
    loaded: LoadedModel,
    extra: Mapping[str, Any],
) -> StageResult:
    """Measure the head agreement of every trace that did not fail."""
    traces = run.require("trace")
    settings = {
        name: value for name, value in config.model_dump(mode="json").items() if name.startswith("agreement_")
    }
    stage = Stage(
        name=f"probe:{AGREEMENT}",
        config={**settings, "model": loaded.identity},
        outputs=(Output(HEAD_AGREEMENT), Output(GATE_SIGNALS)),
        n_parts=traces["n_parts"],
        n_items=traces["n_items"],
        upstream=("trace",),
    )
    mark = run.open_stage(stage, overwrite=execution.overwrite, extra=extra)

    def process(index: int, advance: Callable[[int], None]) -> list[Rows]:
        run.wait_for("trace", parts=[index], patient=crew.count > 1)
        layers: list[Any] = []
        inputs: list[Any] = []
        for row in trace_rows(run, index):
            advance(1)
            if row["status"] == "ok":
                own, outcome = _measured(loaded, row, config, execution)
                layers += own
                inputs.append(outcome)
        return [layers, inputs]

    return run.execute(
        stage, process, crew, mark=mark, items_of_part=lambda index: items_in_part(traces, index)
    )


def input_of(row: Mapping[str, Any], which: str) -> list[int]:
    """The tokens of a trace that count as its input."""
    stop = {"prompt": row["prompt_len"], "context": row["answer_start"], "trace": len(row["token_ids"])}[
        which
    ]
    return list(row["token_ids"][:stop])


def _measured(
    loaded: LoadedModel, row: Mapping[str, Any], config: ProbeConfig, execution: Execution
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    ids = input_of(row, config.agreement_input)
    ids_of_row = {"trace_id": row["trace_id"], "input": config.agreement_input}
    entry = {
        **ids_of_row,
        "n_tokens": len(ids),
        "top": config.agreement_top,
        "queries": config.agreement_queries,
    }
    try:
        if not ids:
            raise ItemError("empty_input", f"the trace has no {config.agreement_input} tokens")
        profile = agreement_profile(
            loaded,
            ids,
            queries=config.agreement_queries,
            top=config.agreement_top,
            stride=config.agreement_stride,
            pairs=config.agreement_pairs,
            seed=config.agreement_seed,
            two_pass=config.agreement_route == "two_pass",
            chunk_size=execution.chunk_size,
        )
    except ItemError as error:
        return [], {**entry, "status": error.status, "reason": error.reason}
    except torch.OutOfMemoryError as error:
        reason = f"{str(error).splitlines()[0]}; lower --chunk-size"
        return [], {**entry, "status": "out_of_memory", "reason": reason}
    gate = gate_signals(list(profile.values()), len(ids), config.agreement_top, config.agreement_bins)
    layers = [
        {**ids_of_row, "layer": layer, "agreement": own.agreement, "n_pairs": own.n_pairs}
        for layer, own in profile.items()
    ]
    return layers, {**entry, **asdict(gate), "status": "ok"}
