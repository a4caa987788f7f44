"""Window occlusion (EpiKV, methods 5.1): a window's tokens are replaced, the answer is regenerated.

A window is load-bearing if the answer changes or is not given any more; a token is important if any window
over it is. Positions, attention mask and context length stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cfkv.answers import Matcher
from cfkv.config import Execution, LabelConfig
from cfkv.errors import ItemError
from cfkv.labels._base import Label, LabelledTrace, LabelTrace, label_kinds
from cfkv.labels._replay import Replay, Replayed
from cfkv.labels._windows import token_importance, token_mean, windows
from cfkv.models.loading import LoadedModel
from cfkv.models.tokens import replacement_id


@label_kinds.register
class Occlusion(Label):
    """Replace the tokens of a window by one token id and regenerate the answer greedily."""

    source: ClassVar[str] = "EpiKV (arXiv:2606.26472), counterfactual occlusion"
    unit: ClassVar[str] = "nats/token of the original answer"
    sign: ClassVar[str] = "positive: occluding the tokens makes the original answer less likely"

    def __init__(
        self, loaded: LoadedModel, config: LabelConfig, execution: Execution, matcher: Matcher
    ) -> None:
        super().__init__(loaded, config, execution, matcher)
        self.replacement = replacement_id(loaded.tokenizer, loaded.model, config.replacement)

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
        context = list(trace.context)
        control = self._replay(replay, [context], [len(context)])[0]
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
        contexts = [self._occluded(context, span) for span in spans]
        replayed = self._replay(replay, contexts, [start for start, _ in spans])
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
        return LabelledTrace(windows=rows, tokens=summary)

    def _replay(self, replay: Replay, contexts: list[list[int]], shared: list[int]) -> list[Replayed]:
        if self.execution.literal:
            return [replay.literal(context) for context in contexts]
        return replay.fast(contexts, shared)

    def _occluded(self, context: list[int], span: tuple[int, int]) -> list[int]:
        start, stop = span
        return [*context[:start], *[self.replacement] * (stop - start), *context[stop:]]

    def _window_row(
        self, trace: LabelTrace, index: int, span: tuple[int, int], result: Replayed, control: Replayed
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
