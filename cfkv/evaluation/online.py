"""`cfkv evaluate online`: traces in, rows of evaluations and keep_sets out, one partition per arm.

The arms that a part lacks are decoded together: a prompt is read once for all policies and budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from cfkv import store
from cfkv.answers import Matcher, boxed_answer, matcher
from cfkv.config import Execution, OnlineConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.evaluation._arms import Arm, acts_at_once, arms, needs_labels, settings, traces_together
from cfkv.evaluation._layers import layer_choices, layer_notes, record_layers
from cfkv.evaluation._loop import decode
from cfkv.evaluation._names import policy_text
from cfkv.evaluation._reading import Reading
from cfkv.evaluation._row import Noise, Outcome, Task
from cfkv.evaluation._split import OtherProblems
from cfkv.models.budget_cache import check_evictable
from cfkv.models.loading import LoadedModel
from cfkv.models.stopping import answer_stop, trace_stop
from cfkv.models.tokens import decode as decode_text
from cfkv.policies._base import Policy
from cfkv.policies._budget import Budget
from cfkv.schemas import EVALUATIONS, KEEP_SETS, TOKEN_LABELS
from cfkv.stage import Job, Output, Rows, Run, Stage, StageResult
from cfkv.traces.rows import check_same_model, items_in_part, trace_rows
from cfkv.traces.segment import segment
from cfkv.workers import Workers

FAMILY = "evaluate online"


def run_online(
    run: Run,
    config: OnlineConfig,
    execution: Execution,
    crew: Workers,
    load: Callable[[], LoadedModel],
    describe: Callable[..., dict[str, Any]],
) -> StageResult:
    """Run every arm on the traces that this process owns; an arm is a stage of its own.

    Raises
    ------
    CfkvError
        For an unknown policy, a budget that is not understood, or a model whose cache cannot be evicted.
    """
    wanted = {arm.name: arm for arm in arms(config)}
    labelled = needs_labels([arm.policy for arm in wanted.values()])
    if labelled:
        require_label(run, config.label, labelled)
    traces = run.require("trace")
    choices = layer_choices(config)
    others = OtherProblems(run, sorted({choice.run for choice in choices.values()}), "layers")
    others.check()
    loaded = load()
    check_same_model(traces, loaded)
    check_evictable(loaded)
    extra = describe(loaded)
    jobs = []
    for arm in wanted.values():
        stage = _stage(arm, config, loaded, traces)
        own = extra if arm.budget is None else {}  # once is enough in the manifest
        jobs.append(Job(stage, run.open_stage(stage, overwrite=execution.overwrite, extra=own)))
        record_layers(run, stage.name, choices.get(arm.text))
    run.manifest.record_config("online", config)
    stages = {job.stage.name: arm for job, arm in zip(jobs, wanted.values(), strict=True)}
    evaluator = _Evaluator(loaded, config, execution)

    def process(index: int, owed: Sequence[Job], advance: Callable[[int], None]) -> list[list[Rows]]:
        run.wait_for("trace", parts=[index], patient=crew.count > 1)
        own = [stages[job.stage.name] for job in owed]
        labels: Mapping[str, Tensor] = {}
        if needs_labels([arm.policy for arm in own]):
            run.wait_for(f"label:{config.label}", parts=[index], patient=crew.count > 1)
            labels = label_values(run, config.label, index)
        found: dict[str, list[list[Any]]] = {arm.name: [[], []] for arm in own}
        whole = trace_rows(run, index)
        others.check(whole)
        rows = [row for row in whole if evaluator.wants(row)]
        advance(items_in_part(traces, index) - len(rows))
        for group in evaluator.groups(rows, len(own)):
            for arm, evaluation, kept in evaluator.evaluate(group, own, labels):
                found[arm.name][0] += kept
                found[arm.name][1].append(evaluation)
            advance(len(group))
        return [list(found[arm.name]) for arm in own]

    results = run.execute_jointly(
        jobs, process, crew, items_of_part=lambda index: items_in_part(traces, index)
    )
    total = StageResult(FAMILY, note=layer_notes(choices))
    for result in results:
        total.statuses.update(result.statuses)
        total.parts_written += result.parts_written
        total.parts_found += result.parts_found
    return total


def require_label(run: Run, kind: str, policies: Sequence[str]) -> None:
    """Raise CfkvError if the labels that these policies are made from are not there."""
    if run.manifest.stage(f"label:{kind}") is None:
        raise CfkvError(
            f"policies {', '.join(policies)} are made from labels of kind {kind!r}, which {run.path} does not have; "
            f"run `cfkv label {run.path} --kind {kind}` first, name another with --label, or leave them out"
        )


def label_values(run: Run, kind: str, index: int) -> dict[str, Tensor]:
    """The labels [N] of each labelled trace of a part: the graded value if there is one, NaN where untested."""
    path = store.part_path(run.path, TOKEN_LABELS, kind, index)
    found = {}
    for row in store.read_part(path, TOKEN_LABELS).to_pylist():
        if row["status"] != "labelled":
            continue
        value = torch.tensor(row["value"] if row["value"] is not None else [], dtype=torch.float32)
        if value.isnan().all():
            importance = torch.tensor(row["importance"], dtype=torch.float32)
            value = torch.where(importance >= 0, importance, torch.nan)
        found[row["trace_id"]] = value
    return found


def _stage(arm: Arm, config: OnlineConfig, loaded: LoadedModel, traces: Mapping[str, Any]) -> Stage:
    own = {**settings(config), "model": loaded.identity, "policy": arm.policy.version}
    upstream: tuple[str, ...] = ("trace",)
    if needs_labels([arm.policy]):
        upstream = ("trace", f"label:{config.label}")
    else:
        del own["label"]
    return Stage(
        name=f"{FAMILY}:{arm.name}",
        config={"online": own},
        outputs=(Output(KEEP_SETS, arm.name), Output(EVALUATIONS, arm.name)),
        n_parts=traces["n_parts"],
        n_items=traces["n_items"],
        upstream=upstream,
    )


@dataclass(frozen=True)
class _Item:
    """One task with what its row says beside the outcome."""

    row: Mapping[str, Any]
    arm: Arm
    sample: int
    budget: Budget | None
    read: int
    task: Task | None
    error: ItemError | None = None


class _Evaluator:
    """Makes tasks of traces and arms, decodes them and grades the answers."""

    def __init__(self, loaded: LoadedModel, config: OnlineConfig, execution: Execution) -> None:
        self.loaded, self.config, self.execution = loaded, config, execution
        self.match: Matcher = matcher(config.answer_match)
        shape = loaded.shape
        per_slot = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        self.bytes_per_token = per_slot * torch.finfo(loaded.dtype).bits // 8

    def wants(self, row: Mapping[str, Any]) -> bool:
        """Whether a trace is run."""
        if row["status"] != "ok":
            return False
        items = self.config.items
        if items == "auto":
            items = "correct" if self.config.mode == "forced" else "all"
        return items == "all" or bool(row["correct"])

    def groups(self, rows: Sequence[Any], n_arms: int) -> Iterator[list[Any]]:
        """Traces that are decoded together."""
        size = traces_together(self.config, n_arms, self.execution.batch_size)
        for start in range(0, len(rows), size):
            yield list(rows[start : start + size])

    def evaluate(
        self, rows: Sequence[Mapping[str, Any]], own: Sequence[Arm], labels: Mapping[str, Tensor]
    ) -> Iterator[tuple[Arm, dict[str, Any], list[dict[str, Any]]]]:
        """Each arm with its row of evaluations and its keep sets, for each trace and sample."""
        items = [item for row in rows for item in self._items(row, own, labels.get(row["trace_id"]))]
        tasks = [item.task for item in items if item.task is not None]
        outcomes = iter(decode(tasks, self.execution.batch_size))
        for item in items:
            if item.task is None:
                error = item.error or ItemError("failed", "not run")
                outcome = Outcome(status=error.status, reason=error.reason)
            else:
                outcome = next(outcomes)
            yield item.arm, self._evaluation(item, outcome), self._kept(item, outcome)

    def _items(self, row: Mapping[str, Any], own: Sequence[Arm], labels: Tensor | None) -> Iterator[_Item]:
        seed = derived_seed(self.config.seed, row["trace_id"])
        forced = self.config.mode == "forced"
        end = row["answer_start"] if forced else row["prompt_len"]
        readings = {
            stop: self._read(row, list(policies.values()), stop, seed)
            for stop, policies in self._by_reading(row, own, end).items()
        }
        for arm in own:
            budget, error = None, None
            try:
                if arm.budget is not None:
                    budget = arm.budget.resolve(
                        prompt_len=row["prompt_len"],
                        total=row["answer_stop"],
                        bytes_per_token=self.bytes_per_token,
                    )
                if needs_labels([arm.policy]) and labels is None:
                    raise ItemError("not_labelled", f"the trace has no labels of kind {self.config.label!r}")
            except ItemError as found:
                error = found
            reading, index = readings[self._reading_stop(row, arm.policy, end)]
            for sample in range(self.config.samples):
                task = None
                if error is None:
                    task = Task(
                        reading=reading,
                        index=index[arm.text],
                        budget=budget,
                        fed=row["token_ids"][reading.length : end],
                        max_new_tokens=self._cap(end),
                        stop=self._stop(row),
                        labels=None if labels is None else labels.to(self.loaded.device),
                        noise=self._noise(row["trace_id"], sample),
                        positions=arm.positions,  # type: ignore[arg-type]
                        simulate=self.config.simulate,
                        record=self.config.keep_sets,
                    )
                yield _Item(row, arm, sample, budget, end, task, error)

    def _by_reading(
        self, row: Mapping[str, Any], own: Sequence[Arm], end: int
    ) -> dict[int, dict[str, Policy]]:
        found: dict[int, dict[str, Policy]] = {}
        for arm in own:
            found.setdefault(self._reading_stop(row, arm.policy, end), {})[arm.text] = arm.policy
        return found

    def _reading_stop(self, row: Mapping[str, Any], policy: Policy, end: int) -> int:
        """How far the text is read at once: to the end for policies that act there, if at all; else the prompt."""
        return end if acts_at_once(policy) else int(row["prompt_len"])

    def _read(
        self, row: Mapping[str, Any], policies: Sequence[Policy], stop: int, seed: int
    ) -> tuple[Reading, dict[str, int]]:
        reading = Reading(
            self.loaded,
            policies,
            row["token_ids"][:stop],
            prompt_len=row["prompt_len"],
            chunk_size=self.execution.chunk_size,
            seed=seed,
        )
        reading.read_to(stop)
        return reading, {policy_text(policy): place for place, policy in enumerate(policies)}

    def _cap(self, end: int) -> int:
        return max(1, min(self.config.max_new_tokens, self.loaded.shape.max_positions - end))

    def _stop(self, row: Mapping[str, Any]) -> Any:
        return (
            answer_stop(self.loaded, row["answer_prefix"])
            if self.config.mode == "forced"
            else trace_stop(self.loaded)
        )

    def _noise(self, trace_id: str, sample: int) -> Noise | None:
        """The same for every arm, so that arms are compared on the same draws."""
        if self.config.samples == 1:
            return None
        return Noise(derived_seed(self.config.seed, f"{trace_id} sample {sample}"), self.config.temperature)

    def _evaluation(self, item: _Item, outcome: Outcome) -> dict[str, Any]:
        row = item.row
        found: dict[str, Any] = {
            "trace_id": row["trace_id"],
            "problem_id": row["problem_id"],
            **item.arm.columns,
            "slots": None if item.budget is None else item.budget.slots,
            "sample_index": item.sample,
            "status": outcome.status,
            "reason": outcome.reason,
        }
        if outcome.status != "ok":
            return found
        answer = self._answer(row, outcome.token_ids)
        correct, verdict = self._grade(answer, row["reference_answer"] or row["answer"])
        names = ("finish_reason", "min_margin", "kept_peak", "evictions", "evicted", "seconds", "peak_bytes")
        return {
            **found,
            **{name: getattr(outcome, name) for name in (*names, "kept_mean", "eviction", "token_ids")},
            "answer": answer,
            "answered": answer is not None,
            "correct": correct,
            "verdict": verdict,
            "n_read": item.read,
            "n_tokens": len(outcome.token_ids),
            "n_steps": outcome.steps,
        }

    def _answer(self, row: Mapping[str, Any], generated: list[int]) -> str | None:
        if self.config.mode == "forced":
            return boxed_answer(row["answer_prefix"] + decode_text(self.loaded.tokenizer, generated))
        token_ids = row["token_ids"][: row["prompt_len"]] + generated
        try:
            spans = segment(self.loaded.tokenizer, token_ids, row["prompt_len"])
        except ItemError:  # nothing was written, or no reasoning before the answer
            return boxed_answer(decode_text(self.loaded.tokenizer, generated))
        return boxed_answer(
            spans.answer_prefix + decode_text(self.loaded.tokenizer, token_ids[spans.answer_start :])
        )

    def _grade(self, answer: str | None, reference: str | None) -> tuple[bool, str]:
        before = getattr(self.match, "timeouts", 0)
        correct = self.match(answer, reference)
        if getattr(self.match, "timeouts", 0) > before:
            return False, "timeout"
        return correct, "correct" if correct else "unanswered" if answer is None else "wrong"

    def _kept(self, item: _Item, outcome: Outcome) -> list[dict[str, Any]]:
        head = {"trace_id": item.row["trace_id"], "arm": item.arm.name, "sample_index": item.sample}
        return [{**head, **asdict(keep)} for keep in outcome.keep_sets]


def derived_seed(seed: int, purpose: str) -> int:
    """A seed of 31 bits that depends on the run's seed and a text, and on nothing else."""
    return int.from_bytes(blake2b(f"{seed} {purpose}".encode(), digest_size=4).digest()) >> 1
