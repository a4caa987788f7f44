"""What the window kinds share: the control, one replay per window, the rows and the token labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from cfkv.config import Execution, LabelConfig
from cfkv.errors import ItemError
from cfkv.labels._base import Label, LabelCost, LabelledTrace, LabelTrace, TraceLength
from cfkv.labels._replay import Replay, Replayed
from cfkv.labels._windows import token_importance, token_mean, windows

Span = tuple[int, int]


class WindowLabel(Label):
    """A kind that intervenes on windows of the reasoning, one at a time, and regenerates the answer."""

    replacement: int | None = None

    @abstractmethod
    def replay_windows(self, replay: Replay, trace: LabelTrace, spans: Sequence[Span]) -> list[Replayed]:
        """What the answer becomes under each window's intervention, in the order of `spans`."""

    def replay_control(self, replay: Replay, trace: LabelTrace) -> Replayed:
        """The answer from the unmodified context."""
        return self.replay_contexts(replay, [list(trace.context)], [trace.answer_start])[0]

    def label(self, trace: LabelTrace) -> LabelledTrace:
        """Regenerate once from the unmodified context (the control), then once per window."""
        if trace.reasoning_length < 1:
            raise ItemError("no_reasoning", "the reasoning span is empty")
        replay = Replay(
            loaded=self.loaded,
            draft=trace.answer_ids,
            prefix=trace.answer_prefix,
            max_new_tokens=self.config.max_new_tokens,
            batch_size=self.execution.batch_size,
            chunk_size=self.execution.chunk_size,
        )
        replay.check_room(trace.answer_start)
        control = self.replay_control(replay, trace)
        spans = windows(trace.reasoning_start, trace.reasoning_stop, self.config.window, self.config.stride)
        summary: dict[str, Any] = {
            "trace_id": trace.trace_id,
            "problem_id": trace.problem_id,
            "kind": self.name,
            "control_answer": control.answer,
            "control_agrees": self.matcher(control.answer, trace.answer),
            "n_windows": len(spans),
        }
        if not summary["control_agrees"]:
            reason = f"the control answered {control.answer!r}, the trace {trace.answer!r}"
            return LabelledTrace(tokens={**summary, "n_windows": 0, "status": "excluded", "reason": reason})
        replayed = self.replay_windows(replay, trace, spans)
        rows = [
            self._window_row(trace, index, span, result, control)
            for index, (span, result) in enumerate(zip(spans, replayed, strict=True))
        ]
        flips = [row["flipped"] for row in rows]
        total = len(trace.token_ids)
        summary |= {
            "importance": token_importance(total, spans, flips),
            "value": token_mean(total, spans, [row["delta_nll"] for row in rows]),
            "n_flipped": sum(flips),
            "status": "labelled",
        }
        return LabelledTrace(rows=rows, tokens=summary)

    @classmethod
    def cost(cls, config: LabelConfig, execution: Execution, length: TraceLength) -> LabelCost:
        """Suffixes from each batch's first window on, with the draft; the literal way forwards everything twice."""
        spans = windows(length.reasoning_start, length.reasoning_stop, config.window, config.stride)
        draft = max(1, length.total - length.answer_start)
        if execution.literal:
            each = 2 * length.answer_start + draft + config.max_new_tokens
            return LabelCost(
                len(spans), (len(spans) + 1) * (2 + config.max_new_tokens), (len(spans) + 1) * each
            )
        tokens = length.answer_start + draft
        for first in range(0, len(spans), execution.batch_size):
            batch = spans[first : first + execution.batch_size]
            tokens += len(batch) * (length.answer_start - batch[0][0] + draft)
        return LabelCost(len(spans), 1 + 2 * -(-len(spans) // execution.batch_size), tokens)

    def replay_contexts(
        self, replay: Replay, contexts: Sequence[list[int]], shared: Sequence[int]
    ) -> list[Replayed]:
        """Replay modified contexts of equal length, the literal way if that was asked for."""
        if self.execution.literal:
            return [replay.literal(context) for context in contexts]
        return replay.fast(contexts, shared)

    def _window_row(
        self, trace: LabelTrace, index: int, span: Span, result: Replayed, control: Replayed
    ) -> Mapping[str, Any]:
        return {
            "trace_id": trace.trace_id,
            "kind": self.name,
            "scope": "all",
            "window_index": index,
            "start": span[0],
            "stop": span[1],
            "replacement_id": self.replacement,
            "answer": result.answer,
            "answered": result.answer is not None,
            "flipped": not self.matcher(result.answer, trace.answer),
            "delta_nll": result.nll - control.nll,
            "min_margin": result.min_margin,
            "accepted_draft": result.accepted_draft,
            "decoded": result.decoded,
            "status": "ok",
        }
