"""A made-up model's tensors for one sequence, shown to a policy as tables with slots in any order.

Axis letters as in cfkv/policies/_base.py; N tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cfkv.policies._base import Policy, Seen, State, View
from cfkv.policies._budget import select
from cfkv.policies._labels import label_column, shuffled

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 8


@dataclass(frozen=True)
class Table:
    """Which token each slot holds, int64 [l, g, S]; -1: none. The state as it was filled; `step` tokens were seen."""

    tokens: Tensor
    state: State
    step: int


class World:
    """Random tensors of `length` tokens, `prompt_len` of them prompt."""

    def __init__(self, length: int, prompt_len: int, seed: int = 0) -> None:
        self.length, self.prompt_len = length, prompt_len
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.generator = generator
        self.keys = 1.5 * draw(LAYERS, KV_HEADS, length, DIM) + draw(LAYERS, KV_HEADS, 1, DIM)
        self.raw_keys = draw(LAYERS, KV_HEADS, length, DIM)
        self.values = draw(LAYERS, KV_HEADS, length, DIM)
        self.queries = 2 * draw(LAYERS, HEADS, length, DIM)
        self.hidden_diff = draw(LAYERS, length).abs() + torch.arange(1, LAYERS + 1)[:, None]
        self.hidden_diff[:, 0] = 0
        self.label = draw(length)
        self.label[: prompt_len + 2] = torch.nan

    @property
    def scaling(self) -> float:
        return DIM**-0.5

    def rows(self, queries: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """Softmax of the rows of `queries` [W] over the slots that hold `tokens` [l, g, S]: [L, H, W, S]."""
        group = HEADS // KV_HEADS
        keys = gather(self.keys, tokens).repeat_interleave(group, dim=1)
        logits = self.queries[:, :, queries] @ keys.transpose(-1, -2) * self.scaling
        hidden = ~valid[:, :, None, :] | (tokens[:, :, None, :] > queries[:, None])
        hidden = heads_of(hidden)
        return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).nan_to_num(0.0)

    def fill(
        self,
        policy: Policy,
        step: int,
        *,
        seed: int = 1,
        block: int = 16,
        spare: int = 5,
    ) -> Table:
        """Tokens 0..step-1 written to shuffled slots, `spare` slots empty, observed in blocks."""
        generator = torch.Generator().manual_seed(seed)
        rows, slots = policy.rows(LAYERS, KV_HEADS), step + spare
        home = torch.stack(
            [torch.randperm(slots, generator=generator)[:step] for _ in range(rows[0] * rows[1])]
        )
        home = home.reshape(*rows, step)
        tokens = torch.full((*rows, slots), -1)
        state = policy.init(rows, slots)
        for start in range(0, step, block):
            new = torch.arange(start, min(start + block, step))
            places = home[..., new]
            tokens.scatter_(-1, places, new.expand(places.shape))
            if policy.observes:
                policy.observe(state, self.seen(policy, new, places, tokens))
        return Table(tokens, state, step)

    def seen(self, policy: Policy, new: Tensor, places: Tensor, tokens: Tensor) -> Seen:
        valid = tokens >= 0
        keys, values = self.keys[:, :, new], self.values[:, :, new]
        columns = {
            "attention": lambda: self.rows(new, tokens.clamp(min=0), valid),
            "hidden_diff": self.hidden_diff[:, new],
            "key_variance": keys.var(dim=-1),
            "value_variance": values.var(dim=-1),
            "key_norm": keys.norm(dim=-1),
            "keys": keys,
            "values": values,
        }
        return Seen(
            tokens=new,
            slots=places,
            positions=garbage_where(tokens),
            valid=valid,
            prompt_len=self.prompt_len,
            columns={name: columns[name] for name in policy.observes},
        )

    def view(
        self,
        policy: Policy,
        table: Table,
        *,
        slots: int = 10**6,
        seed: int = 7,
        extra: Mapping[str, Any] | None = None,
    ) -> View:
        """What the policy would be shown after the last token of the table; `slots`: the budget."""
        tokens, valid = table.tokens, table.tokens >= 0
        step = table.step
        held = tokens.clamp(min=0)
        queries = torch.arange(max(step - policy.window, 0), step)

        def vectors(source: Tensor) -> Tensor:
            return gather(source, held).masked_fill(~valid[..., None], 1e4)

        columns: dict[str, Any] = {
            "keys": lambda: vectors(self.keys),
            "raw_keys": lambda: vectors(self.raw_keys),
            "values": lambda: vectors(self.values),
            "attention": lambda: self.rows(queries, held, valid),
            "queries": lambda: self.queries[:, :, queries],
            "label": lambda: label_column(self.label, held),
            "shuffled_label": lambda: label_column(shuffled(self.label, 3), held),
            **(extra or {}),
        }
        positions = garbage_where(tokens)
        protection = policy.protection(slots, self.prompt_len, step)
        return View(
            step=step,
            prompt_len=self.prompt_len,
            positions=positions,
            valid=valid,
            protected=protection.mask(positions, valid, self.prompt_len, step),
            columns={name: columns[name] for name in policy.needs},
            state=table.state.columns,
            scaling=self.scaling,
            seed=seed,
        )

    def evicted(self, table: Table, keep: Tensor) -> Table:
        """The same table after an eviction."""
        return Table(table.tokens.masked_fill(~keep, -1), table.state, table.step)


def thinned(world: World, policy: Policy, table: Table, keep: int, slots: int, seed: int = 5) -> Table:
    """The table after other evictions: `keep` tokens per row, drawn, but for those protected at a budget of `slots`."""
    generator = torch.Generator().manual_seed(seed)
    view = world.view(policy, table, slots=slots)
    draws = torch.rand(*table.tokens.shape[:-1], world.length, generator=generator)  # by token, not by slot
    scores = draws.gather(-1, table.tokens.clamp(min=0))
    protected = int((view.protected & view.valid).sum(dim=-1).max())
    return world.evicted(table, select(scores, view.positions, view.valid, view.protected, keep - protected))


def heads_of(mask: Tensor) -> Tensor:
    """[l, g, W, S] to [l, H or 1, W, S]."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(HEADS // KV_HEADS, dim=1)


def gather(vectors: Tensor, tokens: Tensor) -> Tensor:
    """[L, G, N, D] at tokens [l, g, S]: [L, G, S, D]."""
    index = tokens.expand(LAYERS, KV_HEADS, -1)[..., None].expand(-1, -1, -1, vectors.shape[-1])
    return vectors.gather(2, index)


def garbage_where(tokens: Tensor) -> Tensor:
    """Positions; those of empty slots are left over from somebody."""
    return torch.where(tokens >= 0, tokens, 3)


def by_token(values: Tensor, tokens: Tensor) -> Tensor:
    """Values [l, g, S] in the order of the tokens, [l, g, valid tokens]; all rows hold equally many."""
    order = tokens.masked_fill(tokens < 0, 2**40).argsort(dim=-1)
    count = int((tokens >= 0).sum(dim=-1).max())
    return values.gather(-1, order)[..., :count]
