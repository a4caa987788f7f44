"""What the window kinds share: the control, one replay per window, the rows and the token labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cfkv.config import Execution, LabelConfig
from cfkv.errors import ItemError
from cfkv.labels._base import Label, LabelCost, LabelledTrace, LabelTrace, TraceLength
from cfkv.labels._memory import budget
from cfkv.labels._packed import Counterfactual
from cfkv.labels._replay import Replay, Replayed
from cfkv.labels._windows import token_importance, token_mean, windows

Span = tuple[int, int]
WINDOW_OPTIONS = frozenset({"window", "stride", "max_new_tokens", "answer_match"})


class WindowLabel(Label):
    """A kind that intervenes on windows of the reasoning, one at a time, and regenerates the answer."""

    options: ClassVar[frozenset[str]] = WINDOW_OPTIONS
    replacement: int | None = None

    @abstractmethod
    def counterfactual(self, trace: LabelTrace, span: Span) -> Counterfactual:
        """What the model sees under a window's intervention."""

    def control(self, trace: LabelTrace) -> Counterfactual:
        """What it sees without one: the last token of the context is read again, which gives the first logits."""
        return Counterfactual(trace.answer_start - 1, trace.context[-1:])

    def label(self, trace: LabelTrace) -> LabelledTrace:
        """Regenerate once from the unmodified context (the control), then once per window."""
        if trace.reasoning_length < 1:
            raise ItemError("no_reasoning", "the reasoning span is empty")
        replay = self.replay(trace)
        replay.check_room()
        control = self._run(replay, [self.control(trace)], trace.answer_ids)[0]
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
        replayed = self._run(replay, [self.counterfactual(trace, span) for span in spans], control.token_ids)
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

    def replay(self, trace: LabelTrace) -> Replay:
        """The engine that regenerates this trace's answer."""
        return Replay(
            loaded=self.loaded,
            context=trace.context,
            answer=trace.answer_ids,
            prefix=trace.answer_prefix,
            max_new_tokens=self.config.max_new_tokens,
            chunk_size=self.execution.chunk_size,
            memory=budget(self.loaded, self.execution.memory_gib),
            scope=self.scope,
        )

    @classmethod
    def cost(cls, config: LabelConfig, execution: Execution, length: TraceLength) -> LabelCost:
        """Each window's tokens from its start on with the answer; the literal way forwards everything twice."""
        spans = windows(length.reasoning_start, length.reasoning_stop, config.window, config.stride)
        answer = max(1, length.total - length.answer_start)
        if execution.literal:
            each = 2 * length.answer_start + answer + config.max_new_tokens
            forwards = (len(spans) + 1) * (2 + config.max_new_tokens)
            return LabelCost(len(spans), forwards, (len(spans) + 1) * each)
        own = [length.answer_start - cls.first_changed(length, start) + answer for start, _ in spans]
        packs = -(-sum(own) // execution.chunk_size)
        return LabelCost(len(spans), 2 + packs, length.answer_start + answer + sum(own))

    @classmethod
    def first_changed(cls, length: TraceLength, start: int) -> int:
        """The first token that a window from `start` on makes the model read again."""
        return start

    def _run(self, replay: Replay, rows: Sequence[Counterfactual], draft: Sequence[int]) -> list[Replayed]:
        if self.execution.literal:
            return [replay.literal(row) for row in rows]
        return replay.fast(rows, draft)

    def _window_row(
        self, trace: LabelTrace, index: int, span: Span, result: Replayed, control: Replayed
    ) -> Mapping[str, Any]:
        return {
            "trace_id": trace.trace_id,
            "kind": self.name,
            "scope": self.scope.name,
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
