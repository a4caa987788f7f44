"""A text read into a cache that keeps everything, while policies watch: the prompt of a decode, or a whole trace.

One reading serves every policy and every budget of its sequence. Axis letters as in cfkv/policies/_base.py; N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from cfkv.models import compat
from cfkv.models.budget_cache import softmax_rows
from cfkv.models.loading import LoadedModel
from cfkv.models.observe import AttentionCall, observing_attention, tapping_hidden
from cfkv.models.slots import SlotCache
from cfkv.policies._base import Policy, Seen, State, View
from cfkv.policies._labels import label_column, shuffled

# Most elements of the attention of a block of tokens, over all layers and heads.
BLOCK_ELEMENTS = 2**24
QUERIES = frozenset({"attention", "queries"})

Column = Tensor | Callable[[], Tensor]


def label_columns(labels: Tensor | None, positions: Tensor, seed: int) -> dict[str, Column]:
    """The columns `label` and `shuffled_label` of slots at `positions`, from the labels [N] of a trace."""
    if labels is None:
        return {}
    return {
        "label": lambda: label_column(labels, positions),
        "shuffled_label": lambda: label_column(shuffled(labels, seed), positions),
    }


def only(columns: Mapping[str, Column], names: Sequence[str]) -> dict[str, Column]:
    """Those of the columns that are named and there."""
    return {name: columns[name] for name in names if name in columns}


class Reading:
    """Tokens of one sequence in order, token i in slot i.

    keys, values, raw (only if some policy needs it) : [L, G, N, D]. queries : the newest ones, [L, H, W, D].
    hidden : the last token's block outputs, [L, hidden]. logits : after the last token, [vocabulary].
    states : one per policy. length : tokens read so far.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policies: Sequence[Policy],
        token_ids: Sequence[int],
        *,
        prompt_len: int,
        chunk_size: int,
        seed: int = 0,
    ) -> None:
        shape, device = loaded.shape, loaded.device
        self.loaded, self.policies, self.prompt_len, self.seed = loaded, list(policies), prompt_len, seed
        self.ids = torch.tensor([list(token_ids)], device=device)
        self.capacity, self.length = len(token_ids), 0
        needs = {name for policy in policies for name in policy.needs}
        self.observed = {name for policy in policies for name in policy.observes}
        sizes = (shape.num_layers, shape.num_kv_heads, self.capacity, shape.head_dim)
        self.keys, self.values = (torch.zeros(sizes, dtype=loaded.dtype, device=device) for _ in range(2))
        compact = any(policy.compact for policy in policies)
        self.raw = torch.zeros_like(self.keys) if "raw_keys" in needs or compact else None
        self.window = max((policy.window for policy in policies), default=0)
        self.queries = torch.zeros(
            shape.num_layers, shape.num_heads, 0, shape.head_dim, dtype=loaded.dtype, device=device
        )
        self.hidden: Tensor | None = None
        self.logits = torch.empty(0)
        self.states: list[State] = [
            policy.init(policy.rows(shape.num_layers, shape.num_kv_heads), self.capacity, device)
            for policy in policies
        ]
        self.windows, self.scaling = compat.layer_windows(loaded.model), [1.0] * shape.num_layers
        self.chunk_size = chunk_size
        if "attention" in self.observed:
            fits = BLOCK_ELEMENTS // (shape.num_layers * shape.num_heads * max(1, self.capacity))
            self.chunk_size = max(1, min(chunk_size, fits))
        self.cache = SlotCache(shape.num_layers, self.capacity)
        for index, layer in enumerate(self.cache.layers):
            layer.adopt(self.keys[index : index + 1], self.values[index : index + 1])
        self._calls: dict[int, AttentionCall] = {}
        self._rows: Tensor | None = None
        self._newest: list[Tensor] = []
        self._bounds = (0, 0)
        self._tables: list[tuple[Tensor, Tensor]] | None = None
        self._differences: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    @torch.inference_mode()
    def read_to(self, stop: int) -> None:
        """Read on up to token `stop`, exclusive."""
        with ExitStack() as stack:
            stack.enter_context(
                observing_attention(self.loaded.model, self._attention, rotary=self.raw is not None)
            )
            if "hidden_diff" in self.observed:
                stack.enter_context(tapping_hidden(self.loaded.model, self._hidden))
            while self.length < stop:
                self._chunk(self.length, min(self.length + self.chunk_size, stop))

    def _chunk(self, start: int, stop: int) -> None:
        layers = self.keys.shape[0]
        if "attention" in self.observed:
            heads = self.loaded.shape.num_heads
            self._rows = torch.empty(layers, heads, stop - start, self.capacity, device=self.ids.device)
        self._newest, self._bounds = [], (start, stop)
        logits = compat.forward(self.loaded.model, self.ids[:, start:stop], self.cache, logits_to_keep=1)
        self.length, self.logits = stop, logits[0, -1]
        if self._newest:
            joined = torch.cat([self.queries, torch.stack(self._newest)], dim=2)
            self.queries = joined[:, :, max(0, joined.shape[2] - self.window) :]
        if self._outputs:
            self.hidden = torch.stack([self._outputs[layer] for layer in range(layers)])
        for policy, state in zip(self.policies, self.states, strict=True):
            if policy.observes:
                policy.observe(state, self._seen(policy, start, stop))

    def _attention(self, call: AttentionCall) -> None:
        start, stop = self._bounds
        self.scaling[call.layer] = call.scaling
        if self.window:
            self._newest.append(call.queries[0, :, max(0, stop - start - self.window) :].clone())
        if self.raw is not None and call.rotary is not None:
            new = call.keys[:, :, start:stop]
            self.raw[call.layer, :, start:stop] = compat.unrotate(call.module, new, *call.rotary)[0]
        if self._rows is not None:
            times = torch.arange(start, stop, device=self.ids.device)
            places = torch.arange(self.capacity, device=self.ids.device)
            self._rows[call.layer] = softmax_rows(
                call.queries[0],
                times,
                self.keys[call.layer],
                places,
                (places < stop)[None],
                scaling=call.scaling,
                window=self.windows[call.layer],
            )

    def _hidden(self, layer: int, output: Tensor) -> None:
        if layer < 0:
            return
        before = self._outputs.get(layer, output[0, 0])  # the first token has no predecessor: 0
        chain = torch.cat([before[None], output[0]]).float()
        self._differences[layer] = (chain[1:] - chain[:-1]).norm(dim=-1)
        self._outputs[layer] = output[0, -1].clone()

    def _seen(self, policy: Policy, start: int, stop: int) -> Seen:
        rows = self._shape(policy)
        keys, values = self.keys[:, :, start:stop], self.values[:, :, start:stop]
        tokens = torch.arange(start, stop, device=self.ids.device)
        columns: dict[str, Column] = {
            "attention": lambda: self._rows,  # type: ignore[dict-item,return-value]
            "hidden_diff": lambda: torch.stack(
                [self._differences[layer] for layer in range(self.keys.shape[0])]
            ),
            "key_variance": lambda: keys.float().var(dim=-1),
            "value_variance": lambda: values.float().var(dim=-1),
            "key_norm": lambda: keys.float().norm(dim=-1),
            "keys": keys,
            "values": values,
        }
        return Seen(
            tokens=tokens,
            slots=tokens.expand(*rows, -1),
            positions=self.positions.expand(*rows, -1),
            valid=(self.positions < stop).expand(*rows, -1),
            prompt_len=self.prompt_len,
            columns=only(columns, policy.observes),
            seed=self.seed,
        )

    def _shape(self, policy: Policy) -> tuple[int, int]:
        return policy.rows(self.loaded.shape.num_layers, self.loaded.shape.num_kv_heads)

    @property
    def positions(self) -> Tensor:
        """Positions of the slots, [N]."""
        return torch.arange(self.capacity, device=self.ids.device)

    def view(self, index: int, slots: int, labels: Tensor | None = None) -> View:
        """What policy `index` is shown now, at a budget of `slots`; its table has a slot per token read or to come.

        `labels` [N of the trace] : for policies made from labels; NaN where untested.
        """
        policy, rows = self.policies[index], self._shape(self.policies[index])
        positions = self.positions.expand(*rows, -1)
        valid = positions < self.length
        count = min(policy.window, self.queries.shape[2])
        queries = self.queries[:, :, self.queries.shape[2] - count :]
        columns: dict[str, Column] = {
            "keys": self.keys,
            "values": self.values,
            "queries": queries,
            "attention": lambda: self._attention_of(queries),
            **({} if self.raw is None else {"raw_keys": self.raw}),
            **label_columns(labels, positions, self.seed),
        }
        protection = policy.protection(slots, self.prompt_len, self.length)
        return View(
            step=self.length,
            prompt_len=self.prompt_len,
            positions=positions,
            valid=valid,
            protected=protection.mask(positions, valid, self.prompt_len, self.length),
            columns=only(columns, policy.needs),
            state=self.states[index].columns,
            scaling=self.scaling[0],
            seed=self.seed,
        )

    def rotary_tables(self, positions: int) -> list[tuple[Tensor, Tensor]]:
        """Cosine and sine [at least `positions`, D] of each layer."""
        if self._tables is None or len(self._tables[0][0]) < positions:
            self._tables = compat.rotary_tables(self.loaded.model, positions, self.keys)
        return self._tables

    def unrotated(self) -> Tensor:
        """Keys before the rotary embedding, [L, G, N, D]; computed now if no policy of this reading asked for them."""
        if self.raw is not None:
            return self.raw
        modules = [
            compat.block_part(layer, "attention", index)
            for index, layer in enumerate(compat.decoder_layers(self.loaded.model))
        ]
        tables = self.rotary_tables(self.capacity)
        return torch.stack(
            [
                compat.unrotate(
                    module, self.keys[layer : layer + 1], *(table[None, : self.capacity] for table in angles)
                )[0]
                for layer, (module, angles) in enumerate(zip(modules, tables, strict=True))
            ]
        )

    def _attention_of(self, queries: Tensor) -> Tensor:
        times = torch.arange(self.length - queries.shape[2], self.length, device=queries.device)
        valid = (self.positions < self.length)[None]
        return torch.stack(
            [
                softmax_rows(
                    queries[layer],
                    times,
                    self.keys[layer],
                    self.positions,
                    valid,
                    scaling=self.scaling[layer],
                    window=self.windows[layer],
                )
                for layer in range(queries.shape[0])
            ]
        )
