"""When a generation ends: at an end token, or once the first boxed answer after the boundary is closed."""

from __future__ import annotations

from typing import Any

from cfkv.answers import first_box
from cfkv.models.decode import StopRule
from cfkv.models.loading import LoadedModel
from cfkv.models.tokens import THINK_END, decode


class _BraceTokens:
    """Which token ids contain a closing brace, looked up once per id."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, bool] = {}

    def __call__(self, token_id: int) -> bool:
        if token_id not in self.known:
            self.known[token_id] = "}" in decode(self.tokenizer, [token_id])
        return self.known[token_id]


def answer_stop(loaded: LoadedModel, prefix: str) -> StopRule:
    """Stop at an end token ("stop") or when `prefix` plus the decoded text holds a complete box ("boxed")."""
    brace = _BraceTokens(loaded.tokenizer)

    def rule(ids: list[int]) -> str | None:
        if ids[-1] in loaded.end_ids:
            return "stop"
        if brace(ids[-1]) and first_box(prefix + decode(loaded.tokenizer, ids)) is not None:
            return "boxed"
        return None

    return rule


def trace_stop(loaded: LoadedModel) -> StopRule:
    """Stop at an end token, or at the first complete box after `</think>`.

    A box inside the reasoning, or in a model that writes no `</think>`, does not end the trace.
    """
    brace = _BraceTokens(loaded.tokenizer)

    def rule(ids: list[int]) -> str | None:
        if ids[-1] in loaded.end_ids:
            return "stop"
        if brace(ids[-1]):
            _, found, after = decode(loaded.tokenizer, ids).rpartition(THINK_END)
            if found and first_box(after) is not None:
                return "boxed"
        return None

    return rule
