"""The three ways in which a trace comes about; each turns items into rows of the traces table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from cfkv.answers import Matcher, boxed_answer
from cfkv.config import Execution, TraceConfig
from cfkv.errors import ItemError
from cfkv.models.decode import Generation, generate_greedy, teacher_forced_logprobs
from cfkv.models.loading import LoadedModel
from cfkv.models.stopping import answer_stop, trace_stop
from cfkv.models.tokens import decode, encode, token_texts
from cfkv.traces.items import TraceItem
from cfkv.traces.prompts import WORKED_ANSWER_PREFIX, prompt_ids, worked_pieces
from cfkv.traces.segment import Spans, answer_length, segment

Row = dict[str, Any]
# Above this share of unknown tokens a text was written for another vocabulary.
MAX_UNKNOWN_SHARE = 0.05


class TraceWriter:
    """Makes traces of one model under one configuration."""

    def __init__(
        self, loaded: LoadedModel, config: TraceConfig, execution: Execution, matcher: Matcher
    ) -> None:
        self.loaded, self.config, self.execution, self.matcher = loaded, config, execution, matcher
        self.tokenizer = loaded.tokenizer
        ways = {"generate": self._generate, "worked_solution": self._restate, "import": self._import}
        self._way: Callable[[Sequence[TraceItem]], dict[str, Row]] = ways[config.mode]

    def rows(self, items: Sequence[TraceItem], advance: Callable[[int], None]) -> list[Row]:
        """One row per item, in order; an item that fails has a status and a reason."""
        found: dict[str, Row] = {}
        for start in range(0, len(items), self.execution.batch_size):
            batch = items[start : start + self.execution.batch_size]
            found.update(self._way(batch))
            advance(len(batch))
        return [found[item.trace_id] for item in items]

    def _generate(self, items: Sequence[TraceItem]) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        ready: list[tuple[TraceItem, list[int]]] = []
        for item in items:
            prompt = prompt_ids(self.tokenizer, item, self.config)
            if self._fits(rows, item, len(prompt) + 1):
                ready.append((item, prompt))
        outputs = self._decode(
            [prompt for _, prompt in ready], self.config.max_new_tokens, lambda: trace_stop(self.loaded)
        )
        for (item, prompt), output in zip(ready, outputs, strict=True):
            token_ids = prompt + output.token_ids
            make = partial(self._segmented, item, token_ids, len(prompt), output)
            rows[item.trace_id] = self._guard(item, make)
        return rows

    def _segmented(self, item: TraceItem, token_ids: list[int], prompt_len: int, output: Generation) -> Row:
        spans = segment(self.tokenizer, token_ids, prompt_len, self.config.boundary)
        return self._row(item, token_ids, prompt_len, spans, output.logprobs, output.finish_reason)

    def _restate(self, items: Sequence[TraceItem]) -> dict[str, Row]:
        prefix = WORKED_ANSWER_PREFIX if self.config.answer_prefix is None else self.config.answer_prefix
        rows: dict[str, Row] = {}
        ready: list[tuple[TraceItem, list[int], tuple[list[int], list[int], list[int]]]] = []
        for item in items:
            prompt = prompt_ids(self.tokenizer, item, self.config)
            try:
                pieces = worked_pieces(self.tokenizer, prompt, item, prefix)
                self._long_enough(len(pieces[1]))
            except ItemError as error:
                rows[item.trace_id] = self._failure(item, error)
                continue
            if self._fits(rows, item, len(prompt) + sum(map(len, pieces)) + 1):
                ready.append((item, prompt, pieces))
        contexts = [prompt + sum(pieces, []) for _, prompt, pieces in ready]
        outputs = self._decode(
            contexts, self.config.answer_max_new_tokens, lambda: answer_stop(self.loaded, prefix)
        )
        for (item, prompt, pieces), context, output in zip(ready, contexts, outputs, strict=True):
            token_ids = context + output.token_ids
            start = len(prompt) + len(pieces[0])
            spans = Spans(
                reasoning_start=start,
                reasoning_stop=start + len(pieces[1]),
                answer_start=len(context),
                answer_stop=len(context) + answer_length(self.tokenizer, output.token_ids, prefix),
                boundary="given",
                answer_prefix=prefix,
            )
            logprobs = self._logprobs(token_ids, len(prompt))
            rows[item.trace_id] = self._row(
                item, token_ids, len(prompt), spans, logprobs, output.finish_reason
            )
        return rows

    def _import(self, items: Sequence[TraceItem]) -> dict[str, Row]:
        return {item.trace_id: self._guard(item, partial(self._imported, item)) for item in items}

    def _imported(self, item: TraceItem) -> Row:
        prompt = prompt_ids(self.tokenizer, item, self.config)
        response = (
            item.response if isinstance(item.response, tuple) else encode(self.tokenizer, item.response or "")
        )
        token_ids = prompt + list(response)
        outside = [i for i in token_ids if i >= self.loaded.shape.vocabulary]
        if outside:
            raise ItemError(
                "unknown_token",
                f"token id {outside[0]} is outside the model's vocabulary of {self.loaded.shape.vocabulary}",
            )
        if not prompt:
            raise ItemError("empty_prompt", "the prompt has no tokens")
        unknown = (
            token_ids.count(self.tokenizer.unk_token_id) if self.tokenizer.unk_token_id is not None else 0
        )
        if isinstance(item.response, str) and unknown > len(token_ids) * MAX_UNKNOWN_SHARE:
            raise ItemError(
                "unknown_words",
                f"{unknown} of {len(token_ids)} tokens are unknown to {self.loaded.name}; name the model that wrote "
                "the trace with --model",
            )
        spans = segment(self.tokenizer, token_ids, len(prompt), self.config.boundary)
        self._check_length(len(token_ids))
        logprobs = self._logprobs(token_ids, len(prompt))
        return self._row(item, token_ids, len(prompt), spans, logprobs, item.finish_reason)

    def _logprobs(self, token_ids: list[int], start: int) -> list[float]:
        return teacher_forced_logprobs(self.loaded, token_ids, start, chunk_size=self.execution.chunk_size)

    def _decode(self, prompts: Sequence[list[int]], cap: int, stop: Callable[[], Any]) -> list[Generation]:
        if not prompts:
            return []
        room = [min(cap, self.loaded.shape.max_positions - len(prompt)) for prompt in prompts]
        return generate_greedy(
            self.loaded,
            prompts,
            max_new_tokens=room,
            stops=[stop() for _ in prompts],
            chunk_size=self.execution.chunk_size,
        )

    def _check_length(self, length: int) -> None:
        limit = self.loaded.shape.max_positions
        if length > limit:
            raise ItemError("too_long", f"{length} tokens are more than the model's {limit} positions")

    def _fits(self, rows: dict[str, Row], item: TraceItem, length: int) -> bool:
        try:
            self._check_length(length)
        except ItemError as error:
            rows[item.trace_id] = self._failure(item, error)
            return False
        return True

    def _long_enough(self, reasoning: int) -> None:
        if reasoning < self.config.min_reasoning:
            raise ItemError(
                "skipped",
                f"reasoning of {reasoning} tokens is below min_reasoning = {self.config.min_reasoning}",
            )

    def _guard(self, item: TraceItem, make: Callable[[], Row]) -> Row:
        try:
            return make()
        except ItemError as error:
            return self._failure(item, error)

    def _identity(self, item: TraceItem) -> Row:
        return {
            "trace_id": item.trace_id,
            "dataset": "import" if self.config.mode == "import" else self.config.dataset,
            "problem_id": item.problem_id,
            "sample_index": item.sample_index,
            "model": self.loaded.name,
            "model_revision": self.loaded.revision,
            "weights": self.loaded.weights,
            "reference_answer": item.reference_answer,
        }

    def _failure(self, item: TraceItem, error: ItemError) -> Row:
        return {**self._identity(item), "status": error.status, "reason": error.reason}

    def _row(
        self,
        item: TraceItem,
        token_ids: list[int],
        prompt_len: int,
        spans: Spans,
        logprobs: Sequence[float],
        finish_reason: str,
    ) -> Row:
        self._long_enough(spans.reasoning_stop - spans.reasoning_start)
        answer = boxed_answer(spans.answer_prefix + decode(self.tokenizer, token_ids[spans.answer_start :]))
        return {
            **self._identity(item),
            "token_ids": token_ids,
            "token_texts": token_texts(self.tokenizer, token_ids),
            "prompt_len": prompt_len,
            **asdict(spans),
            "logprobs": list(logprobs),
            "output_text": decode(self.tokenizer, token_ids[prompt_len:]),
            "answer": answer,
            "correct": self.matcher(answer, item.reference_answer),
            "finish_reason": finish_reason,
            "status": "ok",
        }
