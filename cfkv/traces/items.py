"""The work list of the trace stage: one item per problem, or per imported response."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cfkv.config import TraceConfig
from cfkv.errors import CfkvError
from cfkv.problems._base import problem_sources
from cfkv.problems._files import answer_field, optional_text, read_records, record_id

RESPONSE_FIELDS = ("response", "response_token_ids")


@dataclass(frozen=True, kw_only=True)
class TraceItem:
    """One trace to make. `prompt` and `response` are text or token ids; both are None unless imported."""

    problem_id: str
    sample_index: int
    question: str
    reference_answer: str
    solution: str | None = None
    prompt: str | tuple[int, ...] | None = None
    response: str | tuple[int, ...] | None = None
    finish_reason: str = "imported"

    @property
    def trace_id(self) -> str:
        """Unique within a run."""
        return f"{self.problem_id}/{self.sample_index}"


def trace_items(config: TraceConfig) -> list[TraceItem]:
    """All items in their fixed order.

    Raises
    ------
    CfkvError
        For an unknown dataset, a missing or malformed file, no items at all, or an id that occurs twice.
    """
    found = _imported(config) if config.mode == "import" else _problems(config)
    items = list(itertools.islice(found, config.limit))
    if not items:
        raise CfkvError(f"{config.path or config.dataset} holds no problems; nothing to do")
    twice = [trace_id for trace_id, count in Counter(item.trace_id for item in items).items() if count > 1]
    if twice:
        raise CfkvError(
            f"{config.path or config.dataset}: {len(twice)} ids occur more than once (first: {twice[0]!r}, written "
            "as problem_id/sample_index); make problem_id unique, or number repeated samples with sample_index"
        )
    return items


def _problems(config: TraceConfig) -> Iterator[TraceItem]:
    source = problem_sources.get(config.dataset)()
    if config.limit is None and not source.needs_path:
        raise CfkvError(
            f"dataset {config.dataset!r} generates problems without end; say how many with --limit"
        )
    for problem in source.load(config.path, seed=config.seed):
        yield TraceItem(
            problem_id=problem.problem_id,
            sample_index=0,
            question=problem.question,
            reference_answer=problem.answer,
            solution=problem.solution,
        )


def _imported(config: TraceConfig) -> Iterator[TraceItem]:
    if config.path is None:
        raise CfkvError("--mode import reads a file of traces; name it with --path FILE.jsonl")
    for number, place, record in read_records(config.path):
        prompt = optional_text(record, "prompt", place)
        prompt_ids = _ids(record, "prompt_token_ids", place)
        response_ids = _ids(record, "response_token_ids", place)
        response = optional_text(record, "response", place)
        if response is None and response_ids is None:
            have = ", ".join(sorted(record)) or "none"
            raise CfkvError(f"{place} has neither {' nor '.join(RESPONSE_FIELDS)}; its fields: {have}")
        question = optional_text(record, ("question", "problem"), place)
        if question is None and prompt is None and prompt_ids is None:
            have = ", ".join(sorted(record)) or "none"
            raise CfkvError(
                f"{place} has no question (or problem, prompt, prompt_token_ids); its fields: {have}"
            )
        index = record.get("sample_index", 0)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 2**31:
            raise CfkvError(
                f"{place}: field 'sample_index' is {index!r}, not a whole number from 0 below 2^31"
            )
        yield TraceItem(
            problem_id=record_id(record, number, "trace", place),
            sample_index=index,
            question=question or "",
            reference_answer=answer_field(record, ("answer", "reference_answer"), place),
            prompt=prompt_ids if prompt_ids is not None else prompt,
            response=response_ids if response_ids is not None else response,
            finish_reason=optional_text(record, "finish_reason", place) or "imported",
        )


def _ids(record: Mapping[str, Any], name: str, place: str) -> tuple[int, ...] | None:
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CfkvError(f"{place}: field {name!r} is {type(value).__name__}, not a list of token ids")
    wrong = next((v for v in value if not isinstance(v, int) or isinstance(v, bool) or v < 0), None)
    if wrong is not None:
        raise CfkvError(f"{place}: field {name!r} holds {wrong!r}, which is not a token id")
    return tuple(value)
