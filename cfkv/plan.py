"""What a recipe will cost: items, forwards, tokens and disk, before anything runs (`--dry-run`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfkv import store
from cfkv.config import Execution, LabelConfig, Recipe
from cfkv.evaluation._arms import Arm, acts_at_once, arms, traces_together
from cfkv.evaluation._names import named_policies
from cfkv.labels._base import TraceLength, label_kinds
from cfkv.models.loading import layer_sizes, load_tokenizer
from cfkv.models.tokens import encode
from cfkv.schemas import TRACES
from cfkv.signals._agreement_stage import AGREEMENT
from cfkv.signals._stage import groups
from cfkv.stage import Run, joint_name
from cfkv.traces.items import TraceItem, trace_items
from cfkv.traces.prompts import WORKED_ANSWER_PREFIX, prompt_ids, worked_pieces
from cfkv.traces.stage import trace_identity

# Measured on Parquet parts: bytes per token of a traces row, per window, per signal value, and per row of validity.
TRACE_BYTES, WINDOW_BYTES, VALUE_BYTES, ROW_BYTES = 12.0, 40.0, 2.3, 45.0
# Bytes per row of evaluations, per position of a keep set, and of the two files of an arm's part, however short.
EVALUATION_BYTES, KEPT_BYTES, ARM_PART_BYTES = 120.0, 0.45, 8800


@dataclass(frozen=True)
class Cost:
    """One row of the plan; all numbers are upper bounds where `bound` is True."""

    stage: str
    items: int
    forwards: int
    tokens: int
    disk: int
    bound: bool


@dataclass(frozen=True)
class PlannedTrace(TraceLength):
    """The same with the length of the prompt."""

    prompt_len: int


def plan(recipe: Recipe, execution: Execution, directory: Path, stages: Sequence[str]) -> list[Cost]:
    """Costs of `stages` (trace, label:KIND, probe, evaluate offline, evaluate online) in this order.

    Lengths come from the traces table where it is complete, from the tokenised texts otherwise, with the
    generation cap as the length of what is not written yet.
    """
    lengths, made = _lengths(recipe, directory)
    costs = []
    for name in stages:
        if name == "trace":
            costs.append(_trace(lengths, execution, bound=not made))
        elif name.startswith("label:"):
            config = next(c for c in recipe.label if c.kind == name.partition(":")[2])
            costs.append(_label(config, lengths, execution))
        elif name == "probe":
            costs += _probe(recipe, lengths, execution, bound=not made)
        elif name == "evaluate offline":
            costs.append(_offline(recipe, lengths, execution))
        elif name == "evaluate online":
            costs.append(_online(recipe, lengths, execution))
    return costs


def _lengths(recipe: Recipe, directory: Path) -> tuple[list[PlannedTrace], bool]:
    run = Run(directory)
    record = run.manifest.stage("trace")
    same = record is not None and record["identity"]["config"]["trace"] == trace_identity(recipe.trace)
    if same and not run.missing_parts("trace"):
        frame = store.scan(directory, TRACES).collect()
        rows = frame.filter(frame["status"] == "ok").to_dicts()
        return [_from_row(row) for row in rows], True
    items = trace_items(recipe.trace)
    tokenizer = load_tokenizer(recipe.model)
    return [_estimate(recipe, tokenizer, item) for item in items], False


def _from_row(row: dict[str, Any]) -> PlannedTrace:
    total = len(row["token_ids"])
    spans = (row["reasoning_start"], row["reasoning_stop"], row["answer_start"])
    return PlannedTrace(total, *spans, decoded=total - row["prompt_len"], prompt_len=row["prompt_len"])


def _estimate(recipe: Recipe, tokenizer: Any, item: TraceItem) -> PlannedTrace:
    config = recipe.trace
    prompt = prompt_ids(tokenizer, item, config)
    start = len(prompt)
    if config.mode == "worked_solution" and item.solution:
        prefix = WORKED_ANSWER_PREFIX if config.answer_prefix is None else config.answer_prefix
        opening, solution, closing = worked_pieces(tokenizer, prompt, item, prefix)
        first = start + len(opening)
        context = first + len(solution) + len(closing)
        decoded = config.answer_max_new_tokens
        return PlannedTrace(context + decoded, first, first + len(solution), context, decoded, start)
    if config.mode == "import":
        response = (
            item.response if isinstance(item.response, tuple) else encode(tokenizer, item.response or "")
        )
        total = start + len(response)
        return PlannedTrace(total, start, total, total, 0, start)
    total = start + config.max_new_tokens
    return PlannedTrace(total, start, total, total, config.max_new_tokens, start)


def _trace(lengths: Sequence[TraceLength], execution: Execution, *, bound: bool) -> Cost:
    tokens = sum(length.total for length in lengths)
    decoded = sorted((length.decoded for length in lengths), reverse=True)
    batches = range(0, len(lengths), execution.batch_size)
    forwards = sum(1 + max(decoded[start : start + execution.batch_size]) for start in batches)
    return Cost("trace", len(lengths), forwards, tokens, int(tokens * TRACE_BYTES), bound)


def _label(config: LabelConfig, lengths: Sequence[TraceLength], execution: Execution) -> Cost:
    kind = label_kinds.get(config.kind)
    costs = [kind.cost(config, execution, length) for length in lengths]
    items, forwards, tokens = (
        sum(getattr(cost, name) for cost in costs) for name in ("items", "forwards", "tokens")
    )
    return Cost(f"label:{config.kind}", items, forwards, tokens, int(items * WINDOW_BYTES), True)


def _probe(
    recipe: Recipe, lengths: Sequence[TraceLength], execution: Execution, *, bound: bool
) -> list[Cost]:
    """All groups of signals share one pass; head agreement has one of its own, over at most the trace."""
    layers, kv_heads = layer_sizes(recipe.model)
    tokens = sum(length.total for length in lengths)
    forwards = sum(-(-length.total // execution.chunk_size) for length in lengths)
    known, costs = groups(), []
    names = [group for group in recipe.probe.groups if group in known]
    if names:
        values = 0
        for signal in (signal for group in names for signal in known[group]):
            heads = 1 + kv_heads if recipe.probe.per_head and signal.heads and kv_heads > 1 else 1
            values += tokens * heads * (layers + signal.embedding if signal.layered else 1)
        name = joint_name([f"probe:{group}" for group in names])
        costs.append(Cost(name, len(lengths), forwards, tokens, int(values * VALUE_BYTES), bound))
    if AGREEMENT in recipe.probe.groups:
        disk = int(len(lengths) * layers * WINDOW_BYTES)
        costs.append(Cost(f"probe:{AGREEMENT}", len(lengths), forwards, tokens, disk, True))
    return costs


def _offline(recipe: Recipe, lengths: Sequence[TraceLength], execution: Execution) -> Cost:
    """One pass up to the answer, shared by all policies; none if stored signals are enough, so a bound."""
    config = recipe.offline
    policies = len(named_policies(config.policies))
    tokens = sum(length.answer_start for length in lengths)
    forwards = sum(-(-length.answer_start // execution.chunk_size) for length in lengths)
    rows = policies * len(lengths) * len(config.checkpoints) * (5 + 3 * len(config.budgets))
    return Cost(
        "evaluate offline", policies * len(lengths), forwards, tokens, int(rows * ROW_BYTES), bound=True
    )


def _online(recipe: Recipe, lengths: Sequence[PlannedTrace], execution: Execution) -> Cost:
    """Every trace under every arm, as if all were run to their caps, in batches as long as their longest row."""
    config, size = recipe.online, recipe.trace.part_size
    wanted = arms(config)
    together = traces_together(config, len(wanted), execution.batch_size)
    fed = [length.answer_start - length.prompt_len if config.mode == "forced" else 0 for length in lengths]
    forwards, tokens, parts = 0, 0, range(0, len(lengths), size)
    for part in (slice(start, start + size) for start in parts):
        tasks = len(fed[part]) * len(wanted) * config.samples
        per_group = [len(fed[part][at : at + together]) for at in range(0, len(fed[part]), together)]
        batches = sum(-(-count * len(wanted) * config.samples // execution.batch_size) for count in per_group)
        steps = max(fed[part]) + config.max_new_tokens
        forwards += batches * steps
        tokens += tasks * steps
    # Read at once: the prompt for policies that act while decoding, all that is fed for those that act at its end.
    at_end = {acts_at_once(arm.policy) for arm in wanted}
    for length, more in zip(lengths, fed, strict=True):
        for stop in {length.prompt_len + (more if late else 0) for late in at_end}:
            forwards += -(-stop // execution.chunk_size)
            tokens += stop
    items = len(lengths) * len(wanted) * config.samples
    disk = items * EVALUATION_BYTES + len(parts) * len(wanted) * ARM_PART_BYTES
    if config.keep_sets:
        disk += KEPT_BYTES * _kept_positions(recipe, wanted, lengths, fed)
    name = f"evaluate online, {len(wanted)} arms"
    return Cost(name, items, forwards, tokens, int(disk), True)


def _kept_positions(
    recipe: Recipe, wanted: Sequence[Arm], lengths: Sequence[PlannedTrace], fed: Sequence[int]
) -> int:
    """Positions of all keep sets if every policy evicts whenever it may and a budget never leaves one out."""
    layers, kv_heads = layer_sizes(recipe.model)
    total = 0
    for arm in wanted:
        if arm.budget is None:
            continue
        rows = math.prod(arm.policy.rows(layers, kv_heads))
        for length, more in zip(lengths, fed, strict=True):
            steps = 0 if acts_at_once(arm.policy) else more + recipe.online.max_new_tokens
            evictions = 1 + steps // arm.policy.schedule.growth
            total += recipe.online.samples * rows * evictions * (length.prompt_len + more)
    return total
