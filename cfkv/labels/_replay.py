"""Regenerating an answer under counterfactuals: the literal way, and the same labels faster.

Fast: all counterfactuals of a trace share one cache of its unmodified tokens, and several go in one forward. The
unmodified answer is a draft: one pass over a counterfactual's own tokens and the draft verifies it and gives the
probability of the trace's answer. Where every argmax repeats the draft nothing is decoded, since greedy decoding
would have written just that; elsewhere decoding starts at the first disagreement, many rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cfkv.answers import boxed_answer
from cfkv.errors import ItemError
from cfkv.labels._memory import entry_bytes, queries_at_once
from cfkv.labels._packed import Counterfactual, Pack, Queries, Saved, Tally
from cfkv.labels._scope import Scope
from cfkv.models import compat
from cfkv.models.decode import StopRule, generate_greedy, teacher_forced_logprobs
from cfkv.models.loading import LoadedModel
from cfkv.models.slots import SlotCache
from cfkv.models.stopping import answer_stop
from cfkv.models.tokens import decode

TRUNK, DRAFT, OWN = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a counterfactual led to. `nll` is the mean negative log-likelihood of the trace's answer, nats/token.

    `accepted_draft` counts the leading tokens of the trace's answer that were written again, `decoded` the
    tokens that took a forward of their own.
    """

    token_ids: tuple[int, ...]
    answer: str | None
    nll: float
    min_margin: float
    accepted_draft: int
    decoded: int


@dataclass
class _Writing:
    """A row on its way: what greedy decoding has written, the last token of it not forwarded yet."""

    token_ids: list[int]
    nll: float
    margin: float
    decoded: int = 0


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Regenerates the answer of one trace; holds the cache of its unmodified context.

    Parameters
    ----------
    context : what precedes the answer. answer : the trace's own answer. prefix : text before it that may open
    the box. chunk_size : most tokens of a forward. memory : bytes for packed queries. scope : where hidden
    entries are hidden.
    """

    loaded: LoadedModel
    context: tuple[int, ...]
    answer: tuple[int, ...]
    prefix: str
    max_new_tokens: int
    chunk_size: int
    memory: int
    scope: Scope
    tally: Tally = field(default_factory=Tally)

    @cached_property
    def _cache(self) -> SlotCache:
        return SlotCache(self.loaded.shape.num_layers, len(self.context) + self.chunk_size)

    @cached_property
    def _stop(self) -> StopRule:
        return answer_stop(self.loaded, self.prefix)

    def check_room(self) -> None:
        """Raise ItemError if the context and the answer do not fit the model's positions."""
        need, limit = len(self.context) + len(self.answer), self.loaded.shape.max_positions
        if need > limit:
            raise ItemError(
                "too_long", f"context and answer take {need} tokens, the model has {limit} positions"
            )

    def room(self, context_length: int) -> int:
        """Tokens that may be decoded after a context."""
        return min(self.max_new_tokens, self.loaded.shape.max_positions - context_length)

    def literal(self, row: Counterfactual) -> Replayed:
        """The protocol as written: one context, a full prefill, greedy decoding token by token."""
        if row.hidden:
            return self._literal_hidden(row)
        context = [*self.context[: row.keep], *row.tokens]
        generation = generate_greedy(
            self.loaded,
            [context],
            max_new_tokens=[self.room(len(context))],
            stops=[self._stop],
            chunk_size=self.chunk_size,
        )[0]
        logprobs = teacher_forced_logprobs(
            self.loaded, [*context, *self.answer], len(context), chunk_size=self.chunk_size
        )
        ids, nll = generation.token_ids, -sum(logprobs) / len(logprobs)
        return self._result(_Writing(ids, nll, generation.min_margin, len(ids)))

    @torch.inference_mode()
    def _literal_hidden(self, row: Counterfactual) -> Replayed:
        """The original answer is scored in a pass of its own, on a copy of the cache."""
        cache = compat.new_cache()
        for first in range(0, row.keep, self.chunk_size):
            piece = self.context[first : min(first + self.chunk_size, row.keep)]
            compat.forward(self.loaded.model, self._ids(piece), cache, logits_to_keep=1)
        logits = self._literal_step(cache, row, row.tokens)
        forced, nll, expected = compat.map_cache(cache), 0.0, logits
        for token in self.answer:
            nll -= float(expected.log_softmax(dim=-1)[token])
            expected = self._literal_step(forced, row, [token])
        written: list[int] = []
        margin = float("inf")
        while len(written) < self.room(row.length):
            first, second = logits.topk(2).values.tolist()
            margin = min(margin, first - second)
            written.append(int(logits.argmax()))
            if self._stop(written) is not None:
                break
            logits = self._literal_step(cache, row, written[-1:])
        return self._result(_Writing(written, nll / len(self.answer), margin, len(written)))

    def _literal_step(self, cache: compat.DynamicCache, row: Counterfactual, tokens: Sequence[int]) -> Tensor:
        held = compat.cache_length(cache)
        keys = torch.arange(held + len(tokens), device=self.loaded.device)
        hidden = torch.zeros_like(keys, dtype=torch.bool)
        for start, stop in row.hidden:
            hidden[start:stop] = True
        plain, hiding = (
            compat.masks_from_positions(self.loaded.model, keys[held:], keys, hidden=each)
            for each in (None, hidden)
        )
        mask, layer_masks = self.scope.masks(plain, hiding, self.loaded.shape)
        return compat.forward(
            self.loaded.model,
            self._ids(tokens),
            cache,
            positions=keys[None, held:],
            attention_mask=mask,
            layer_masks=layer_masks,
        )[0, -1]

    @torch.inference_mode()
    def fast(self, rows: Sequence[Counterfactual], draft: Sequence[int]) -> list[Replayed]:
        """Replay all `rows`, in their order.

        Parameters
        ----------
        draft : sequence of int
            What greedy decoding writes after the unmodified context, or is expected to; it changes no result.
        """
        if not rows:
            return []
        with compat.grouped_attention(self.loaded.model):
            return self._fast(rows, tuple(draft) or self.answer)

    def _fast(self, rows: Sequence[Counterfactual], draft: tuple[int, ...]) -> list[Replayed]:
        pack = Pack(self.loaded, self._prefill(max(row.keep for row in rows)), rows, self.scope, self.tally)
        found: dict[int, Replayed] = {}
        going: dict[int, _Writing] = {}
        saved: list[Saved] = []
        width = queries_at_once(self.loaded, pack.base, self.memory, self.chunk_size)
        for group in self._groups(rows, draft, width):
            unfinished = {}
            for row, state in self._verify(pack, rows, group, draft, width).items():
                if self._finished(state.token_ids, rows[row].length):
                    found[row] = self._result(state)
                else:
                    unfinished[row] = state
            if unfinished:
                saved.append(pack.save(self._alive(pack, rows, unfinished)))
            going |= unfinished
            pack.clear()
            if self._size(rows, going) > self.memory:
                found |= self._decode(pack, rows, going, saved)
                going, saved = {}, []
        found |= self._decode(pack, rows, going, saved)
        return [found[row] for row in range(len(rows))]

    def _prefill(self, length: int) -> SlotCache:
        """The cache of the unmodified context's first `length` tokens or more."""
        cache = self._cache
        for first in range(compat.cache_length(cache), length, self.chunk_size):
            piece = self.context[first : min(first + self.chunk_size, length)]
            compat.forward(self.loaded.model, self._ids(piece), cache, logits_to_keep=1)
            self.tally.forwards += 1
            self.tally.forwarded += len(piece)
        return cache

    def _groups(
        self, rows: Sequence[Counterfactual], draft: Sequence[int], width: int
    ) -> Iterator[list[int]]:
        """Neighbouring rows that fit one forward; a row longer than that is a group of its own."""
        extra = len(draft) - 1 + (len(self.answer) - 1 if draft != self.answer else 0)
        group: list[int] = []
        taken = 0
        for index, row in enumerate(rows):
            if group and taken + len(row.tokens) + extra > width:
                yield group
                group, taken = [], 0
            group.append(index)
            taken += len(row.tokens) + extra
        yield group

    def _verify(
        self,
        pack: Pack,
        rows: Sequence[Counterfactual],
        group: Sequence[int],
        draft: tuple[int, ...],
        width: int,
    ) -> dict[int, _Writing]:
        """Forward each row's tokens with the draft, and beside it the trace's own answer where that differs."""
        queries, scored, targets = Queries(), list[int](), list[int]()
        same = draft == self.answer
        for index in group:
            row = rows[index]
            end = row.length
            queries.add(index, TRUNK, row.keep, row.tokens)
            scored.append(len(queries) - 1)
            queries.add(index, DRAFT, end, draft[:-1])
            if not same:
                queries.add(index, OWN, end, self.answer[:-1])
            scored += range(scored[-1] + 1, len(queries))
            targets += self.answer if same else (self.answer[0], *draft[1:], *self.answer[1:])
        best, margins, logprobs = self._scores(pack, queries, scored, targets, width)
        each = len(scored) // len(group)
        found = {}
        for place, index in enumerate(group):
            first = place * each
            accepted = _agreement(best[first : first + len(draft)], draft)
            written = [*draft[:accepted], *best[first + accepted : first + len(draft)][:1]]
            own = logprobs[first : first + 1] + logprobs[first + each - len(self.answer) + 1 : first + each]
            written = self._cut(written, self.room(rows[index].length))
            found[index] = _Writing(written, -sum(own) / len(own), min(margins[first : first + len(written)]))
        return found

    def _scores(
        self, pack: Pack, queries: Queries, scored: Sequence[int], targets: Sequence[int], width: int
    ) -> tuple[list[int], list[float], list[float]]:
        """Argmax, top-1 margin and the target's log-probability at the `scored` queries."""
        best, margins, logprobs = list[int](), list[float](), list[float]()
        for start in range(0, len(queries), width):
            stop = min(start + width, len(queries))
            wanted = [
                (place, target)
                for place, target in zip(scored, targets, strict=True)
                if start <= place < stop
            ]
            # A forward without a single logit is none that every model can do.
            places = [place - start for place, _ in wanted] or [stop - start - 1]
            logits = pack.forward(queries.piece(start, stop), places)
            if wanted:
                chosen = torch.tensor([[target] for _, target in wanted], device=logits.device)
                logprobs += (logits.gather(-1, chosen)[:, 0] - logits.logsumexp(dim=-1)).tolist()
                best += logits.argmax(dim=-1).tolist()
                margins += _margins(logits)
        return best, margins, logprobs

    def _cut(self, written: list[int], room: int) -> list[int]:
        """End what was accepted where greedy decoding would have ended."""
        for length in range(1, min(len(written), room) + 1):
            if self._stop(written[:length]) is not None:
                return written[:length]
        return written[:room]

    def _finished(self, written: list[int], context_length: int) -> bool:
        return len(written) >= self.room(context_length) or (self._stop(written) is not None)

    def _alive(self, pack: Pack, rows: Sequence[Counterfactual], going: dict[int, _Writing]) -> Tensor:
        """Which of the pack's own entries the rows still need: their tokens, and what was forwarded of the draft."""
        stops = torch.zeros(len(rows), dtype=torch.long)
        for index, state in going.items():
            stops[index] = rows[index].length + len(state.token_ids) - 1
        stops = stops.to(pack.rows.device)
        return (pack.lanes != OWN) & (pack.positions < stops[pack.rows])

    def _size(self, rows: Sequence[Counterfactual], going: dict[int, _Writing]) -> int:
        """Bytes that the entries of these rows may grow to."""
        tokens = sum(len(rows[index].tokens) + self.max_new_tokens for index in going)
        return tokens * entry_bytes(self.loaded)

    def _decode(
        self, pack: Pack, rows: Sequence[Counterfactual], going: dict[int, _Writing], saved: Sequence[Saved]
    ) -> dict[int, Replayed]:
        """Go on greedily with all rows at once, one query per row and step."""
        found: dict[int, Replayed] = {}
        going = dict(going)
        if going:
            pack.restore(saved)
        while going:
            queries = Queries()
            for index, state in going.items():
                place = rows[index].length + len(state.token_ids) - 1
                queries.add(index, DRAFT, place, state.token_ids[-1:])
            logits = pack.forward(queries, range(len(queries)))
            for index, token, margin in zip(
                list(going), logits.argmax(dim=-1).tolist(), _margins(logits), strict=True
            ):
                state = going[index]
                state.token_ids.append(token)
                state.margin = min(state.margin, margin)
                state.decoded += 1
                if self._finished(state.token_ids, rows[index].length):
                    found[index] = self._result(going.pop(index))
            alive = self._alive(pack, rows, going)
            if going and 2 * int(alive.sum()) < len(alive):
                kept = pack.save(alive)
                pack.clear()
                pack.restore([kept])
        pack.clear()
        return found

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.loaded.device)

    def _result(self, state: _Writing) -> Replayed:
        return Replayed(
            token_ids=tuple(state.token_ids),
            answer=boxed_answer(self.prefix + decode(self.loaded.tokenizer, state.token_ids)),
            nll=state.nll,
            min_margin=state.margin,
            accepted_draft=_agreement(state.token_ids, self.answer),
            decoded=state.decoded,
        )


def _margins(logits: Tensor) -> list[float]:
    top = logits.topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).tolist()


def _agreement(ids: Sequence[int], draft: Sequence[int]) -> int:
    count = 0
    for mine, theirs in zip(ids, draft, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
