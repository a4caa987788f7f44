"""One teacher-forced pass over a trace, by chunks, folding every signal on the way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.observe import (
    EMBEDDING_LAYER,
    AttentionCall,
    observing_attention,
    tapping_hidden,
    tapping_parts,
)
from cfkv.models.selfcheck import limits, number_ranges
from cfkv.signals._base import Observation, Signal
from cfkv.signals._logits import logit_rows
from cfkv.signals._rows import RowPlans, attention_rows
from cfkv.signals._tokens import TokenFacts, token_classes

# values[signal name, layer (None: a signal without layers)] = float32 [heads or 1, tokens]
SignalValues = dict[tuple[str, int | None], np.ndarray]

HIDDEN, PARTS = "hidden_CE", {"attention_output_CE": "attention", "mlp_output_CE": "mlp"}
CACHED = frozenset(
    ["keys_GCD", "values_GCD", "raw_keys_GCD", "cached_keys_GND", "cached_values_GND", "queries_HCD"]
)
ROWS, LOGITS, TOKENS = "rows", "logits", "tokens"


def needs_cache(signals: Sequence[Signal]) -> bool:
    """Whether any of the signals reads keys, values, queries or attention."""
    return any({*CACHED, ROWS} & set(signal.observes) for signal in signals)


@torch.inference_mode()
def probe(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    signals: Sequence[Signal],
    *,
    chunk_size: int,
    reasoning: tuple[int, int] | None = None,
    query_block: int | None = None,
) -> SignalValues:
    """Read `signals` off every layer for every token.

    Holds one state per (signal, layer) and the KV cache; everything else is reduced as soon as it exists.

    Parameters
    ----------
    chunk_size : tokens per forward. A model with layers that keep a state instead of keys and values gets the
        whole trace in one.
    reasoning : start and stop of the reasoning, for the signals of positions; default: the whole trace.
    query_block : rows of attention at a time; default: as many as stay in the processor's cache.

    Raises
    ------
    CfkvError
        If a layer's attention cannot be observed.
    """
    pass_ = _Pass(loaded, token_ids, signals, reasoning or (0, len(token_ids)), query_block)
    step = len(token_ids) if limits(loaded) else chunk_size
    with pass_.taps():
        for start in range(0, len(token_ids), step):
            pass_.advance(start, min(start + step, len(token_ids)))
    return pass_.values()


class _Pass:
    """The states of one pass, and the taps that fold into them."""

    def __init__(
        self,
        loaded: LoadedModel,
        token_ids: Sequence[int],
        signals: Sequence[Signal],
        reasoning: tuple[int, int],
        query_block: int | None,
    ) -> None:
        self.loaded, self.reasoning = loaded, reasoning
        self.ids = torch.tensor(list(token_ids), device=loaded.device)
        self.length = len(token_ids)
        self.signals = {signal.name: signal for signal in signals}
        self.states: dict[tuple[str, int | None], Any] = {}
        self.cache = compat.own_cache(loaded.model) if limits(loaded) else compat.new_cache()
        self.start = self.stop = 0
        self.plans = RowPlans(query_block)
        self.observed: set[int] = set()
        self.rows = self._reading(ROWS)
        self.cached = [
            signal for signal in signals if CACHED & set(signal.observes) and ROWS not in signal.observes
        ]
        self.logits, self.tokens = self._reading(LOGITS), self._reading(TOKENS)
        self.classes = token_classes(loaded.tokenizer, token_ids) if self.tokens else None

    def _reading(self, field: str) -> list[Signal]:
        return [signal for signal in self.signals.values() if field in signal.observes]

    def taps(self) -> ExitStack:
        """All taps that somebody reads, as one context manager; none stays if one cannot be set."""
        model = self.loaded.model
        with ExitStack() as stack:
            if hidden := self._reading(HIDDEN):
                stack.enter_context(tapping_hidden(model, self._hidden_tap(HIDDEN, hidden)))
            for field, part in PARTS.items():
                if readers := self._reading(field):
                    stack.enter_context(tapping_parts(model, part, self._hidden_tap(field, readers)))
            if self.rows or self.cached:
                rotary = bool(self._reading("raw_keys_GCD"))
                stack.enter_context(observing_attention(model, self._attention_tap, rotary=rotary))
            return stack.pop_all()

    def advance(self, start: int, stop: int) -> None:
        """Forward the tokens start..stop-1 and fold what they show."""
        self.start, self.stop = start, stop
        self.plans.forget()
        logits = compat.forward(
            self.loaded.model,
            self.ids[None, start:stop],
            self.cache,
            logits_to_keep=0 if self.logits else 1,
        )
        if self.logits:
            following = self.ids[start + 1 : stop + 1].to(logits.device)
            reduced = logit_rows(logits[0, : len(following)], following)
            self._fold(self.logits, None, {LOGITS: reduced})
        if self.classes is not None:
            facts = TokenFacts(self.ids[start:stop], self.classes[start:stop], self.reasoning)
            self._fold(self.tokens, None, {TOKENS: facts})
        if (self.rows or self.cached) and len(self.observed) < self.loaded.shape.num_layers:
            missing = number_ranges(sorted(set(range(self.loaded.shape.num_layers)) - self.observed))
            raise CfkvError(
                f"layers {missing} of {self.loaded.name} do not call an attention function of transformers, so their "
                "keys and attention cannot be read; probe other groups: hidden, logits, position"
            )

    def values(self) -> SignalValues:
        """What was folded, on the CPU."""
        return {
            (name, layer): self.signals[name].read(state).float().cpu().numpy()
            for (name, layer), state in self.states.items()
        }

    def _fold(
        self, signals: Sequence[Signal], layer: int | None, seen: dict[str, Any], rows: slice | None = None
    ) -> None:
        """Show `signals` what was seen of the chunk's tokens, or of those in `rows`."""
        start, stop = (self.start, self.stop) if rows is None else (rows.start, rows.stop)
        observation = Observation(start=start, stop=stop, length=self.length, **seen)
        for signal in signals:
            key = (signal.name, layer)
            if key not in self.states:
                self.states[key] = signal.init()
            self.states[key] = signal.update(self.states[key], observation)

    def _hidden_tap(self, field: str, readers: Sequence[Signal]) -> Any:
        embedding = [signal for signal in readers if signal.embedding]

        def tap(layer: int, output: Tensor) -> None:
            self._fold(embedding if layer == EMBEDDING_LAYER else readers, layer, {field: output[0]})

        return tap

    def _attention_tap(self, call: AttentionCall) -> None:
        self.observed.add(call.layer)
        chunk = call.queries.shape[2]
        keys, values = call.keys[0], call.values[0]
        shown = {"cached_keys_GND": keys, "cached_values_GND": values, "queries_HCD": call.queries[0]}
        if self.cached:
            new = {"keys_GCD": keys[:, -chunk:], "values_GCD": values[:, -chunk:]}
            if call.rotary is not None:
                raw = compat.unrotate(call.module, call.keys[:, :, -chunk:], *call.rotary)
                new["raw_keys_GCD"] = raw[0]
            self._fold(self.cached, call.layer, {**shown, **new})
        for rows in attention_rows(call, self.plans) if self.rows else ():
            self._fold(self.rows, call.layer, {ROWS: rows, **shown}, slice(rows.start, rows.stop))
