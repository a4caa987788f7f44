"""Packed replay: many counterfactuals of one trace as extra queries over one shared cache.

Each counterfactual is a row: it sees the leading entries of the shared cache (without those that it hides) and
its own tokens. One forward serves many rows, nothing of the cache is copied, and no token is padding. Each
function has a literal twin: one counterfactual at a time, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cfkv.labels._scope import Scope
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.slots import Entries, SlotCache

Block = tuple[int, int]


@dataclass(frozen=True)
class Counterfactual:
    """What a replay still sees of a trace, and what it reads again.

    keep : leading cached entries that it sees.
    tokens : what is forwarded after them, at positions keep, keep + 1, ...; at least one.
    hidden : half-open spans of entries before `keep` that are hidden from all forwarded tokens.
    """

    keep: int
    tokens: tuple[int, ...]
    hidden: tuple[Block, ...] = ()

    @property
    def length(self) -> int:
        """Tokens up to the answer; the answer's first position."""
        return self.keep + len(self.tokens)


@dataclass
class Tally:
    """Forwards and forwarded tokens so far, padding included."""

    forwards: int = 0
    forwarded: int = 0


@dataclass(frozen=True)
class Queries:
    """Tokens of one or more rows, one list entry per token.

    rows : index of the counterfactual. lanes : tokens of lane 0 are seen by all later tokens of their row,
    those of another lane by their lane alone, so that two continuations of one text stand side by side.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)

    def add(self, row: int, lane: int, start: int, tokens: Sequence[int]) -> None:
        """Append a run of tokens at positions start, start + 1, ..."""
        self.token_ids.extend(tokens)
        self.positions.extend(range(start, start + len(tokens)))
        self.rows.extend([row] * len(tokens))
        self.lanes.extend([lane] * len(tokens))

    def __len__(self) -> int:
        return len(self.token_ids)

    def piece(self, start: int, stop: int) -> Queries:
        """The tokens from `start` to `stop`."""
        return Queries(
            *(each[start:stop] for each in (self.token_ids, self.positions, self.rows, self.lanes))
        )


@dataclass(frozen=True)
class Saved:
    """Entries of a pack's rows, copied, with what says who sees them."""

    entries: Entries
    positions: Tensor
    rows: Tensor
    lanes: Tensor


class Pack:
    """The shared cache with the rows' own tokens after it.

    Parameters
    ----------
    cache : SlotCache
        The unmodified trace so far; its entries are the shared ones, and stay.
    rows : sequence of Counterfactual
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: SlotCache,
        rows: Sequence[Counterfactual],
        scope: Scope,
        tally: Tally | None = None,
    ) -> None:
        self.loaded, self.cache, self.scope = loaded, cache, scope
        self.tally = tally or Tally()
        self.base = compat.cache_length(cache)
        device = loaded.device
        most = max((len(row.hidden) for row in rows), default=0)
        spans = [[*row.hidden, *[(0, 0)] * (most - len(row.hidden))] for row in rows]
        self.keep = torch.tensor([row.keep for row in rows], device=device)
        self.hidden = torch.tensor(spans, device=device, dtype=torch.long).view(len(rows), most, 2)
        self.clear()

    def clear(self) -> None:
        """Forget the rows' own tokens."""
        self.cache.truncate(self.base)
        empty = torch.zeros(0, dtype=torch.long, device=self.loaded.device)
        self.positions, self.rows, self.lanes = empty, empty, empty

    def save(self, alive: Tensor) -> Saved:
        """Copy those of the rows' own tokens that are True in `alive`."""
        chosen = alive.nonzero()[:, 0]
        entries = self.cache.take(self.base + chosen)
        return Saved(entries, self.positions[chosen], self.rows[chosen], self.lanes[chosen])

    def restore(self, saved: Sequence[Saved]) -> None:
        """Append saved tokens to an empty pack."""
        self.cache.put([each.entries for each in saved])
        self.positions, self.rows, self.lanes = (
            torch.cat([getattr(each, name) for each in saved]) for name in ("positions", "rows", "lanes")
        )

    def forward(self, queries: Queries, keep: Sequence[int]) -> Tensor:
        """Forward `queries` on top of what the rows have; logits [len(keep), vocabulary] of the queries `keep`."""
        device = self.loaded.device
        ids, positions, rows, lanes = (
            torch.tensor(each, device=device)
            for each in (queries.token_ids, queries.positions, queries.rows, queries.lanes)
        )
        self.positions = torch.cat([self.positions, positions])
        self.rows, self.lanes = torch.cat([self.rows, rows]), torch.cat([self.lanes, lanes])
        prefix = torch.arange(self.base, device=device)
        own = (rows[:, None] == self.rows) & ((self.lanes == 0) | (lanes[:, None] == self.lanes))
        kept = prefix < self.keep[rows, None]
        keys = torch.cat([prefix, self.positions])
        shown = kept
        for span in self.hidden[rows].unbind(dim=1):
            shown = shown & ((prefix < span[:, :1]) | (prefix >= span[:, 1:]))
        hiding = self._mask(positions, keys, torch.cat([shown, own], dim=1))
        plain = (
            hiding if self.scope.everywhere else self._mask(positions, keys, torch.cat([kept, own], dim=1))
        )
        mask, layer_masks = self.scope.masks(plain, hiding, self.loaded.shape)
        self.tally.forwards += 1
        self.tally.forwarded += len(queries)
        return compat.forward(
            self.loaded.model,
            ids[None],
            self.cache,
            positions=positions[None],
            attention_mask=mask,
            layer_masks=layer_masks,
            logits_to_keep=torch.tensor(list(keep), device=device),
        )[0]

    def _mask(self, positions: Tensor, keys: Tensor, visible: Tensor) -> compat.Mask:
        return compat.masks_from_positions(self.loaded.model, positions, keys, visible=visible)


@torch.inference_mode()
def packed_logprobs(
    loaded: LoadedModel,
    cache: SlotCache,
    tokens: Sequence[int],
    removals: Sequence[Sequence[Block]],
    scope: Scope,
    tally: Tally | None = None,
) -> Tensor:
    """Log-probabilities after each of `tokens`, once per set of blocks that is hidden.

    Parameters
    ----------
    cache : SlotCache
        The first `step` tokens of the sequence; it is left as it is.
    tokens : sequence of int
        The next tokens of the sequence, at positions step, step + 1, ...
    removals : sequence of sequences of (start, stop)
        Half-open spans of cached entries, one set per replay; an empty set hides nothing.

    Returns
    -------
    Tensor
        float32 natural logs [removals, tokens, vocabulary].
    """
    step, queries = compat.cache_length(cache), Queries()
    rows = [Counterfactual(step, tuple(tokens), tuple(removal)) for removal in removals]
    for index in range(len(rows)):
        queries.add(index, 0, step, tokens)
    pack = Pack(loaded, cache, rows, scope, tally)
    with compat.grouped_attention(loaded.model):
        logits = pack.forward(queries, range(len(queries)))
    pack.clear()
    logits = logits.view(len(rows), len(tokens), -1)
    for row in logits:  # a second tensor of the whole size would be the peak
        row.copy_(row.log_softmax(dim=-1))
    return logits


@torch.inference_mode()
def literal_logprobs(
    loaded: LoadedModel,
    cache: compat.DynamicCache,
    tokens: Sequence[int],
    removal: Sequence[Block],
    scope: Scope,
) -> Tensor:
    """As `packed_logprobs` for one set of blocks, [tokens, vocabulary]: one token at a time on a copied cache.

    Entries that are hidden everywhere are cut out of the cache; under a narrower scope they are masked.
    """
    step, device = compat.cache_length(cache), loaded.device
    gone = torch.zeros(step, dtype=torch.bool, device=device)
    for start, stop in removal:
        gone[start:stop] = True
    cut = gone if scope.everywhere else torch.zeros_like(gone)
    keys = torch.arange(step, device=device)[~cut]
    held = compat.map_cache(cache, slots=keys)
    hidden = gone[~cut]
    found = []
    for position, token in enumerate(tokens, step):
        query = torch.tensor([position], device=device)
        keys, hidden = torch.cat([keys, query]), torch.cat([hidden, hidden.new_zeros(1)])
        masks = [
            compat.masks_from_positions(loaded.model, query, keys, hidden=each) for each in (None, hidden)
        ]
        mask, layer_masks = scope.masks(masks[0], masks[1], loaded.shape)
        ids = torch.tensor([[token]], device=device)
        logits = compat.forward(
            loaded.model, ids, held, positions=query[None], attention_mask=mask, layer_masks=layer_masks
        )
        found.append(logits[0, -1].log_softmax(dim=-1))
    return torch.stack(found)


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats over the last axis of two tensors of log-probabilities, never below 0."""
    return (reference.exp() * (reference - other)).sum(dim=-1).clamp(min=0)
