"""Regenerating an answer from modified contexts: the literal way, and the same labels faster.

Fast: contexts that share a prefix share its cache; several are one batch; and one pass over the rest of the
context plus the original answer gives that answer's probability and verifies it as a draft. A row whose every
argmax repeats the draft needs no decoding: greedy decoding would have written just that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cfkv.answers import boxed_answer
from cfkv.errors import ItemError
from cfkv.models import compat
from cfkv.models.decode import decode_greedy, generate_greedy, teacher_forced_logprobs
from cfkv.models.loading import LoadedModel
from cfkv.models.stopping import answer_stop
from cfkv.models.tokens import decode


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a context led to. `nll` is the mean negative log-likelihood of the original answer, nats/token."""

    token_ids: tuple[int, ...]
    answer: str | None
    nll: float
    min_margin: float
    accepted_draft: int
    decoded: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Regenerates the answer of one trace.

    `draft` is the original answer; `prefix` the answer text before it that may open the box.
    """

    loaded: LoadedModel
    draft: tuple[int, ...]
    prefix: str
    max_new_tokens: int
    batch_size: int
    chunk_size: int

    def check_room(self, context_length: int) -> None:
        """Raise ItemError if the context and the draft do not fit the model's positions."""
        need, limit = context_length + len(self.draft), self.loaded.shape.max_positions
        if need > limit:
            raise ItemError(
                "too_long", f"context and answer take {need} tokens, the model has {limit} positions"
            )

    def room(self, context_length: int) -> int:
        """Tokens that may be decoded after a context."""
        return min(self.max_new_tokens, self.loaded.shape.max_positions - context_length)

    def literal(self, context: Sequence[int]) -> Replayed:
        """The protocol as written: one context, a full prefill, greedy decoding token by token."""
        generation = generate_greedy(
            self.loaded,
            [context],
            max_new_tokens=[self.room(len(context))],
            stops=[answer_stop(self.loaded, self.prefix)],
            chunk_size=self.chunk_size,
        )[0]
        logprobs = teacher_forced_logprobs(
            self.loaded, [*context, *self.draft], len(context), chunk_size=self.chunk_size
        )
        accepted = _agreement(generation.token_ids, self.draft)
        return self._result(
            generation.token_ids,
            -sum(logprobs) / len(logprobs),
            generation.min_margin,
            accepted,
            len(generation.token_ids),
        )

    @torch.inference_mode()
    def fast(self, contexts: Sequence[Sequence[int]], shared: Sequence[int]) -> list[Replayed]:
        """Replay contexts in order; neighbours of equal length are batched.

        Parameters
        ----------
        contexts : sequence of token ids
            Each equals the unmodified context up to its entry in `shared`.
        shared : sequence of int
            Number of leading tokens that are unmodified, not decreasing.
        """
        results: list[Replayed] = []
        base = compat.new_cache()
        for start, stop in self._batches(contexts):
            batch = contexts[start:stop]
            common = min(min(shared[start:stop]), len(batch[0]) - 1)
            base = self._extend(base, batch[0], common)
            results += self._batch(batch, base)
        return results

    def _batches(self, contexts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        start = 0
        while start < len(contexts):
            stop = start + 1
            while stop < min(start + self.batch_size, len(contexts)) and len(contexts[stop]) == len(
                contexts[start]
            ):
                stop += 1
            yield start, stop
            start = stop

    @torch.inference_mode()
    def masked(self, context: Sequence[int], start: int, hidden: Sequence[tuple[int, int]]) -> list[Replayed]:
        """Replay the unmodified context with cached entries hidden from all tokens from `start` on.

        Parameters
        ----------
        start : int
            Tokens before it have read the whole context; 1 <= start < len(context).
        hidden : sequence of (start, stop)
            One half-open span of entries per replay, all before `start`; an empty one hides nothing.
        """
        base = self._extend(compat.new_cache(), context, start)
        results: list[Replayed] = []
        for first in range(0, len(hidden), self.batch_size):
            spans = hidden[first : first + self.batch_size]
            mask = torch.ones(
                len(spans), len(context) + len(self.draft), dtype=torch.long, device=self.loaded.device
            )
            for row, (low, high) in enumerate(spans):
                mask[row, low:high] = 0
            results += self._batch([context] * len(spans), base, mask)
        return results

    @torch.inference_mode()
    def literal_masked(self, context: Sequence[int], start: int, hidden: tuple[int, int]) -> Replayed:
        """As `masked`, for one span: prefill, then token by token, the original answer in a pass of its own."""
        ids = torch.tensor([list(context)], device=self.loaded.device)
        mask = torch.ones(1, len(context), dtype=torch.long, device=self.loaded.device)
        mask[0, hidden[0] : hidden[1]] = 0
        cache = self._extend(compat.new_cache(), context, start)
        logits = compat.forward(self.loaded.model, ids[:, start:], cache, attention_mask=mask)[:, -1]
        forced = compat.map_cache(cache)
        generation = decode_greedy(
            self.loaded,
            cache,
            logits,
            next_positions=torch.tensor([len(context)], device=self.loaded.device),
            max_new_tokens=[self.room(len(context))],
            stops=[answer_stop(self.loaded, self.prefix)],
            mask=mask,
        )[0]
        total = 0.0
        for token in self.draft:
            total -= float(logits[0].log_softmax(dim=-1)[token])
            mask = torch.cat([mask, mask.new_ones(1, 1)], dim=1)
            step = torch.tensor([[token]], device=self.loaded.device)
            logits = compat.forward(self.loaded.model, step, forced, attention_mask=mask)[:, -1]
        ids_found = generation.token_ids
        agreed = _agreement(ids_found, self.draft)
        return self._result(ids_found, total / len(self.draft), generation.min_margin, agreed, len(ids_found))

    def _extend(self, base: compat.DynamicCache, context: Sequence[int], length: int) -> compat.DynamicCache:
        held = compat.cache_length(base)
        for first in range(held, length, self.chunk_size):
            piece = torch.tensor(
                [context[first : min(first + self.chunk_size, length)]], device=self.loaded.device
            )
            compat.forward(self.loaded.model, piece, base, logits_to_keep=1)
        return base

    def _batch(
        self, contexts: Sequence[Sequence[int]], base: compat.DynamicCache, mask: Tensor | None = None
    ) -> list[Replayed]:
        held, length = compat.cache_length(base), len(contexts[0])
        draft = list(self.draft)
        rows = torch.tensor(
            [[*context[held:], *draft[:-1]] for context in contexts], device=self.loaded.device
        )
        cache = compat.expand_cache(base, len(contexts))
        logits = self._forward(rows, cache, mask, keep=len(draft))
        targets = torch.tensor(draft, device=self.loaded.device)
        nll = (logits.logsumexp(dim=-1) - logits[:, torch.arange(len(draft)), targets]).mean(dim=-1)
        agrees = logits.argmax(dim=-1) == targets
        accepted = agrees.long().cumprod(dim=-1).sum(dim=-1)
        top = logits.topk(2, dim=-1).values
        margins = (top[..., 0] - top[..., 1]).amin(dim=-1)
        room = self.room(length)
        stop = answer_stop(self.loaded, self.prefix)
        end = next((n for n in range(1, len(draft) + 1) if stop(draft[:n]) is not None), None)
        whole = end == len(draft) or (end is None and len(draft) >= room)
        keeps = (accepted == len(draft)) & (len(draft) <= room) & whole
        found: dict[int, Replayed] = {}
        rejected = [row for row in range(len(contexts)) if not bool(keeps[row])]
        if rejected:
            found = self._decode(cache, logits, mask, rejected, length, nll)
        for row in range(len(contexts)):
            if row not in found:
                found[row] = self._result(draft, float(nll[row]), float(margins[row]), len(draft), 0)
        return [found[row] for row in range(len(contexts))]

    def _forward(self, rows: Tensor, cache: compat.DynamicCache, mask: Tensor | None, keep: int) -> Tensor:
        """Logits of the last `keep` columns, forwarded by chunks that end before them."""
        held, body = compat.cache_length(cache), rows.shape[1] - keep
        for first in range(0, body, self.chunk_size):
            stop = min(first + self.chunk_size, body)
            seen = None if mask is None else mask[:, : held + stop]
            piece = rows[:, first:stop]
            compat.forward(self.loaded.model, piece, cache, attention_mask=seen, logits_to_keep=1)
        seen = None if mask is None else mask[:, : held + rows.shape[1]]
        return compat.forward(self.loaded.model, rows[:, body:], cache, attention_mask=seen)

    def _decode(
        self,
        cache: compat.DynamicCache,
        logits: Tensor,
        mask: Tensor | None,
        rows: list[int],
        length: int,
        nll: Tensor,
    ) -> dict[int, Replayed]:
        chosen = torch.tensor(rows, device=self.loaded.device)
        generations = decode_greedy(
            self.loaded,
            compat.map_cache(cache, rows=chosen, slots=slice(0, length)),
            logits[chosen, 0],
            next_positions=torch.full((len(rows),), length, device=self.loaded.device),
            max_new_tokens=[self.room(length)] * len(rows),
            stops=[answer_stop(self.loaded, self.prefix) for _ in rows],
            mask=None if mask is None else mask[chosen, :length],
        )
        return {
            row: self._result(
                generation.token_ids,
                float(nll[row]),
                generation.min_margin,
                _agreement(generation.token_ids, self.draft),
                len(generation.token_ids),
            )
            for row, generation in zip(rows, generations, strict=True)
        }

    def _result(self, ids: Sequence[int], nll: float, margin: float, accepted: int, decoded: int) -> Replayed:
        return Replayed(
            token_ids=tuple(ids),
            answer=boxed_answer(self.prefix + decode(self.loaded.tokenizer, ids)),
            nll=nll,
            min_margin=margin,
            accepted_draft=accepted,
            decoded=decoded,
        )


def _agreement(ids: Sequence[int], draft: Sequence[int]) -> int:
    count = 0
    for mine, theirs in zip(ids, draft, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
