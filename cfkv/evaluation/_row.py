"""One sequence under one policy and budget: its slots, its policy's state, and what it did.

Axis letters as in cfkv/policies/_base.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from cfkv.errors import CfkvError, ItemError
from cfkv.evaluation._reading import Column, Reading, label_columns, only
from cfkv.models.budget_cache import BudgetCache, Reads, softmax_rows
from cfkv.models.decode import StopRule
from cfkv.policies._base import Policy, Protection, Seen, State, View, check_scores
from cfkv.policies._budget import Budget, select, victim

Positions = Literal["absolute", "compact", "slot"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is decoded: a text that was read, a policy of its reading, a budget, and tokens that are fed.

    reading, index : the text before, and which of its policies. budget : None evicts nothing. fed : tokens of the
    trace that follow the reading, each a step of its own. max_new_tokens, stop : of what is generated after them.
    labels : of the trace's tokens, for policies made from labels. noise : what is added to the logits of a sample,
    a function of the vocabulary's size; None is greedy. simulate : mask what is evicted, even where it could be
    overwritten. record : keep the sets of positions that are left after each eviction.
    """

    reading: Reading
    index: int
    budget: Budget | None
    fed: Sequence[int] = ()
    max_new_tokens: int = 1
    stop: StopRule
    labels: Tensor | None = None
    noise: Noise | None = None
    positions: Positions = "absolute"
    simulate: bool = False
    record: bool = False

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self.reading.policies[self.index]

    @property
    def length(self) -> int:
        """The most tokens that the cache would hold if nothing were evicted."""
        return self.reading.length + len(self.fed) + self.max_new_tokens


class Noise:
    """Gumbel noise of one sample: the largest of logits / temperature + noise is a draw from the softmax."""

    def __init__(self, seed: int, temperature: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.temperature = temperature

    def perturb(self, logits: Tensor) -> Tensor:
        """[vocabulary] to the same; the next token's draw at each call."""
        uniform = torch.rand(logits.shape[-1], generator=self.generator, dtype=torch.float64)
        gumbel = -(-uniform.clamp(min=1e-300).log()).log()
        return logits / self.temperature + gumbel.to(logits.device, torch.float32)


@dataclass(frozen=True)
class KeepSet:
    """Positions that are left after an eviction, of one row of the policy's table."""

    layer: int
    kv_head: int
    step: int
    kept: list[int]


@dataclass
class Outcome:
    """What became of a task; fields as in the table `evaluations`."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    min_margin: float = float("inf")
    steps: int = 0
    kept_sum: float = 0.0
    kept_peak: float = 0.0
    evictions: int = 0
    evicted: float = 0.0
    seconds: float = 0.0
    peak_bytes: int | None = None
    eviction: str = "none"
    keep_sets: list[KeepSet] = field(default_factory=list)
    status: str = "ok"
    reason: str | None = None

    @property
    def kept_mean(self) -> float | None:
        """Mean over steps of the cached tokens per KV head; None without a step."""
        return self.kept_sum / self.steps if self.steps else None


def reads(policies: Sequence[Policy], *, rotating: bool) -> Reads:
    """What the cache must keep beside keys and values for these policies."""
    needs = {name for policy in policies for name in policy.needs}
    observed = {name for policy in policies for name in policy.observes}
    wide = max(
        (p.window for p in policies if p.window > 1 or "queries" in p.needs),
        default=0,
    )
    return Reads(
        probabilities="attention" in needs | observed,
        queries=wide,
        raw="raw_keys" in needs or rotating,
        hidden="hidden_diff" in observed,
    )


class Row:
    """The slots of one task in a `BudgetCache`; `place` is its row there."""

    def __init__(self, task: Task) -> None:
        reading = task.reading
        self.task, self.policy, self.outcome = task, task.policy, Outcome()
        shape = reading.loaded.shape
        self.layers, self.kv_heads = shape.num_layers, shape.num_kv_heads
        self.rows = self.policy.rows(self.layers, self.kv_heads)
        self.place, self.step = 0, reading.length
        self.simulated = task.budget is not None and (
            task.simulate or self.policy.ragged and not self.policy.by_layer
        )
        self.positions: Positions = "compact" if self.policy.compact else task.positions
        if self.simulated and self.positions != "absolute":
            raise CfkvError(
                f"policy {self.policy.name} is simulated by masks, where slots are not the cache's order; use "
                "--positions absolute"
            )
        if (
            task.budget is not None
            and task.labels is None
            and {"label", "shuffled_label"} & set(self.policy.needs)
        ):
            raise CfkvError(
                f"policy {self.policy.name} is made from labels, and the task has none; give it the `labels` of its "
                "trace [N], NaN where untested, or another policy"
            )
        self.fed, self.pending, self.ended = 0, 0, False
        self.free = torch.empty(0)
        self.taken, self.held = 0, 0.0
        self.new_slots = torch.empty(0)
        self._loaded = torch.empty(0, dtype=torch.int64)  # slots of the reading, [l, g, K]
        self._state = State({}, {})
        self._mask: Tensor | None = None
        self._gone = 0

    @property
    def protected(self) -> int:
        """Tokens that the policy protects now."""
        return self._protection.count(self.task.reading.prompt_len, self.step)

    @property
    def _protection(self) -> Protection:
        slots = self.task.budget.slots if self.task.budget is not None else self.task.length
        return self.policy.protection(slots, self.task.reading.prompt_len, self.step)

    @property
    def slots(self) -> int:
        """Slots that the task needs at most."""
        ahead = self.task.length - self.task.reading.length
        if self.simulated:
            return self.task.length
        budget, schedule = self.task.budget, self.policy.schedule
        if budget is None or schedule.kind in ("never", "once"):
            return self._loaded.shape[-1] + ahead
        return max(self._loaded.shape[-1], min(self.task.length, self._most + schedule.growth))

    @cached_property
    def _most(self) -> int:
        """The most slots that the budget allows at any step: what is protected may grow and shrink."""
        budget = self.task.budget
        if budget is None:
            return self.task.length
        if budget.scope == "total":
            return budget.slots
        first, prompt_len = self.task.reading.length, self.task.reading.prompt_len
        return max(
            budget.total(self.policy.protection(budget.slots, prompt_len, step).count(prompt_len, step))
            for step in range(first, self.task.length + 1)
        )

    def prepare(self) -> None:
        """Let the policy evict of what was read; after this, `slots` are known.

        Raises
        ------
        ItemError
            If the budget is not above what is protected.
        """
        self._loaded, self._state = self._first_eviction()

    def load(self, cache: BudgetCache, place: int) -> None:
        """Take over what was read, without what the policy evicts of it; row `place` of the cache."""
        reading, self.place = self.task.reading, place
        kept, state = self._loaded, self._state
        self._state = State({}, {})
        count = kept.shape[-1]
        self.state = self.policy.init(self.rows, self.slots, reading.keys.device)
        for name, column in state.columns.items():
            self.state.columns[name][..., :count] = column
        self.state.memory = state.memory
        index = kept.expand(self.layers, self.kv_heads, -1)[..., None].expand(
            -1, -1, -1, reading.keys.shape[-1]
        )
        cache.load(
            place,
            keys=reading.keys.gather(2, index),
            values=reading.values.gather(2, index),
            raw=self._raw(index),
            positions=kept.expand(self.layers, self.kv_heads, -1),
            queries=reading.queries,
            hidden=reading.hidden,
        )
        self.free = torch.arange(count, self.slots, device=kept.device).expand(*self.rows, -1)
        if self._mask is not None:
            self._drop(cache, ~self._mask)
        self.held = self._count(cache)
        if self.positions == "compact" and self.outcome.evictions:
            self._move_together(cache)

    def _raw(self, index: Tensor) -> Tensor | None:
        """Keys before the rotary embedding, if the policy or compact positions need them."""
        if self.positions == "compact" or "raw_keys" in self.policy.needs:
            return self.task.reading.unrotated().gather(2, index)
        return None

    def _first_eviction(self) -> tuple[Tensor, State]:
        """Slots of the reading that are loaded, [l, g, K], and the state there."""
        reading, budget = self.task.reading, self.task.budget
        everything = torch.arange(reading.length, device=reading.keys.device).expand(*self.rows, -1)
        state, self._mask = reading.states[self.task.index].clone(), None
        if budget is None or not self.policy.schedule.due(0):
            return everything, state.gather(everything)
        view = reading.view(self.task.index, budget.slots, self.task.labels)
        if reading.length <= budget.total(self.protected):
            return everything, state.gather(everything)
        keep = self._keep(view, float(reading.length))
        self._note_eviction(view, keep)
        if self.simulated:
            self._mask = keep[..., : reading.length]
            return everything, state.gather(everything)
        # Layers may hold different numbers for good (whole chunks): the table is as long as the longest.
        counts = keep.sum(dim=-1)
        if not self.policy.ragged:
            for_good = self.policy.schedule.kind == "once"
            self._check_even(counts, counts[:, :1] if for_good else counts[:1, :1])
        count = int(counts.max())
        if self.positions != "absolute" and bool((counts != count).any()):
            raise CfkvError(
                f"policy {self.policy.name} keeps {int(counts.min())} to {count} tokens on different layers, so that "
                f"the next one has no single place for positions {self.positions!r}; use --positions absolute"
            )
        slots = (~keep).to(torch.int8).argsort(dim=-1, stable=True)[..., :count]
        self._mask = keep.gather(-1, slots)
        return slots, state.gather(slots)

    def _keep(self, view: View, length: float) -> Tensor:
        budget = self.task.budget
        if budget is None:
            raise RuntimeError("nothing to evict without a budget")
        scores = self.policy.score(view)
        check_scores(self.policy, view, scores)
        room = self._room(view, length)
        quotas = self.policy.quotas(room, scores, view)
        return select(scores, view.positions, view.valid, view.protected, room if quotas is None else quotas)

    def _room(self, view: View, length: float) -> int:
        budget = self.task.budget
        if budget is None:
            raise RuntimeError("nothing to evict without a budget")
        protected = int((view.protected & view.valid).sum(dim=-1).max())
        try:
            return budget.room(protected, int(length) + (length > int(length)))
        except CfkvError as error:
            raise ItemError("budget_too_small", f"policy {self.policy.name}: {error}") from error

    @property
    def _spare(self) -> float:
        """Slots, mean over layers, that the table has because another layer needs them."""
        if self._mask is None or self.simulated:
            return 0.0
        return float((~self._mask).sum(dim=-1).amin(dim=-1).float().mean())

    def next_slots(self) -> Tensor:
        """Where the next token goes, [L, G]; a row that ended writes where nobody looks."""
        if self.ended:
            return torch.zeros(self.layers, self.kv_heads, dtype=torch.int64, device=self.free.device)
        self.new_slots = self.free[..., self.taken : self.taken + 1]
        return self.new_slots[..., 0].expand(self.layers, self.kv_heads)

    def rotary_position(self) -> int:
        """What the rotary embedding is told of the next token."""
        return self.step if self.positions == "absolute" else int(self.held)

    def after(self, cache: BudgetCache) -> None:
        """The next token was written and attended: let the policy see it, and evict if it is time."""
        self.taken += 1
        self.step += 1
        self.held += 1
        if self.policy.observes:
            self.policy.observe(self.state, self._seen(cache))
        budget = self.task.budget
        due = self.policy.schedule.due(self.step - self.task.reading.length)
        if budget is not None and due and self.held > budget.total(self.protected):
            self._evict(cache)
        self.outcome.steps += 1
        self.outcome.kept_sum += self.held
        self.outcome.kept_peak = max(self.outcome.kept_peak, self.held)

    def _evict(self, cache: BudgetCache) -> None:
        view = self._view(cache)
        scores = self.policy.score(view)
        check_scores(self.policy, view, scores)
        room = self._room(view, self.held)
        quotas = self.policy.quotas(room, scores, view)
        if quotas is None and not self.simulated and self.held - self.protected - room == 1:
            gone = victim(scores, view.positions, view.valid, view.protected)[..., None]
            if self.task.record:
                self._note_eviction(view, view.valid.scatter(-1, gone, False))  # noqa: FBT003
            else:
                self.outcome.evictions += 1
                self.outcome.evicted += 1
            self._free(cache, gone)
        else:
            limits = room if quotas is None else quotas
            keep = select(scores, view.positions, view.valid, view.protected, limits)
            gone_mask = view.valid & ~keep
            if not bool(gone_mask.any()):
                return
            self._note_eviction(view, keep)
            if self.simulated:
                self._drop(cache, gone_mask)
            else:
                counts = gone_mask.sum(dim=-1)
                self._check_even(counts, counts[:1, :1])
                slots = (~gone_mask).to(torch.int8).argsort(dim=-1, stable=True)
                self._free(cache, slots[..., : int(counts[0, 0])])
        self.held = self._count(cache) if self.simulated else self.held - self._gone
        if self.positions == "compact":
            self._move_together(cache)

    def _check_even(self, counts: Tensor, expected: Tensor) -> None:
        if bool((counts != expected).any()):
            raise CfkvError(
                f"policy {self.policy.name} keeps or evicts {int(counts.min())} to {int(counts.max())} slots at once "
                "on different layers or KV heads; it must declare `ragged = True`"
            )

    def _free(self, cache: BudgetCache, slots: Tensor) -> None:
        """Physical eviction: the slots [l, g, E] are for the next tokens."""
        self.state.reset(slots)
        self._gone = slots.shape[-1]
        everywhere = slots.expand(self.layers, self.kv_heads, -1)
        cache.valid[:, self.place].scatter_(2, everywhere, False)  # noqa: FBT003
        left = self.free[..., self.taken :]
        self.free, self.taken = torch.cat([left, slots], dim=-1) if left.shape[-1] else slots, 0

    def _drop(self, cache: BudgetCache, mask: Tensor) -> None:
        """Simulated eviction: the slots stay as they are and are never seen again."""
        own = cache.valid[:, self.place, :, : mask.shape[-1]]
        own &= ~mask

    def _count(self, cache: BudgetCache) -> float:
        """Cached tokens per KV head, mean over layers and heads."""
        return float(cache.valid[:, self.place].sum()) / (self.layers * self.kv_heads)

    def _note_eviction(self, view: View, keep: Tensor) -> None:
        outcome = self.outcome
        outcome.evictions += 1
        outcome.evicted += float((view.valid & ~keep).sum()) / (self.rows[0] * self.rows[1])
        if self.task.record:
            for layer in range(self.rows[0]):
                for head in range(self.rows[1]):
                    kept = view.positions[layer, head][keep[layer, head]].sort().values.tolist()
                    place = (layer if self.rows[0] > 1 else -1, head if self.rows[1] > 1 else -1)
                    outcome.keep_sets.append(KeepSet(*place, self.step, kept))

    def _move_together(self, cache: BudgetCache) -> None:
        """Rotate the kept keys to the positions 0, 1, ... of the cache."""
        tables = self.task.reading.rotary_tables(self.slots)
        valid, positions = cache.valid[:, self.place], cache.positions[:, self.place]
        last = torch.iinfo(torch.int64).max
        order = positions.masked_fill(~valid, last).argsort(dim=-1)
        cache.rotate_again(self.place, order.argsort(dim=-1).clamp(max=self.slots - 1), tables)

    def _table(self, cache: BudgetCache) -> tuple[Tensor, Tensor]:
        """Positions and valid of the policy's own table, [l, g, S]."""
        l, g = self.rows  # noqa: E741
        place = (slice(l), self.place, slice(g), slice(self.slots))
        return cache.positions[place], cache.valid[place]

    def _seen(self, cache: BudgetCache) -> Seen:
        positions, valid = self._table(cache)
        place, keys, values = self.place, cache.new_keys, cache.new_values
        columns: dict[str, Column] = {
            "attention": lambda: self._probabilities(cache),
            "hidden_diff": lambda: cache.hidden_diff[:, place : place + 1],
            "key_variance": lambda: keys[:, place].float().var(dim=-1, keepdim=True),
            "value_variance": lambda: values[:, place].float().var(dim=-1, keepdim=True),
            "key_norm": lambda: keys[:, place].float().norm(dim=-1, keepdim=True),
            "keys": lambda: keys[:, place, :, None],
            "values": lambda: values[:, place, :, None],
        }
        return Seen(
            tokens=torch.tensor([self.step - 1], device=keys.device),
            slots=self.new_slots,
            positions=positions,
            valid=valid,
            prompt_len=self.task.reading.prompt_len,
            columns=only(columns, self.policy.observes),
            seed=self.task.reading.seed,
        )

    def _probabilities(self, cache: BudgetCache) -> Tensor:
        """Attention of the newest token, [L, H, 1, S]."""
        if cache.probabilities is None:
            raise RuntimeError("attention is not kept")
        return cache.probabilities[:, self.place, :, None, : self.slots]

    def _attention(self, cache: BudgetCache) -> Tensor:
        """Attention of the newest `window` queries, [L, H, W, S]."""
        if self.policy.window == 1:
            return self._probabilities(cache)
        queries = cache.newest_queries(self.place, self.policy.window)
        times = torch.arange(self.step - queries.shape[2], self.step, device=queries.device)
        place = (self.place, slice(None), slice(self.slots))
        return torch.stack(
            [
                softmax_rows(
                    queries[layer],
                    times,
                    cache.keys[layer][place],
                    cache.positions[layer][place],
                    cache.valid[layer][place],
                    scaling=cache.scaling[layer],
                    window=cache.windows[layer],
                )
                for layer in range(self.layers)
            ]
        )

    def _view(self, cache: BudgetCache) -> View:
        positions, valid = self._table(cache)
        place, reading = self.place, self.task.reading
        columns: dict[str, Column] = {
            "keys": cache.keys[:, place, :, : self.slots],
            "values": cache.values[:, place, :, : self.slots],
            "queries": lambda: cache.newest_queries(place, self.policy.window),
            "attention": lambda: self._attention(cache),
            **label_columns(self.task.labels, positions, reading.seed),
        }
        if cache.raw is not None:
            columns["raw_keys"] = cache.raw[:, place, :, : self.slots]
        return View(
            step=self.step,
            prompt_len=reading.prompt_len,
            positions=positions,
            valid=valid,
            protected=self._protection.mask(positions, valid, reading.prompt_len, self.step),
            columns=only(columns, self.policy.needs),
            state=self.state.columns,
            scaling=cache.scaling[0],
            seed=reading.seed,
        )

    def take(self, logits: Tensor | None, top: Tensor | None) -> bool:
        """Choose the token that is fed next, from the trace or from `logits` [vocabulary]; False at the end.

        top : the two largest logits.
        """
        task, outcome = self.task, self.outcome
        if self.fed < len(task.fed):
            self.pending = task.fed[self.fed]
            self.fed += 1
            return True
        if logits is None or top is None:
            raise RuntimeError("no logits to choose from")
        if len(outcome.token_ids) >= task.max_new_tokens:
            return False
        outcome.min_margin = min(outcome.min_margin, float(top[0] - top[1]))
        scored = logits if task.noise is None else task.noise.perturb(logits)
        self.pending = int(scored.argmax())
        outcome.token_ids.append(self.pending)
        reason = task.stop(outcome.token_ids)
        if reason is not None:
            outcome.finish_reason = reason
            return False
        return len(outcome.token_ids) < task.max_new_tokens

    @property
    def feeding(self) -> bool:
        """Whether the next token is the trace's own."""
        return self.fed < len(self.task.fed)

    def finish(self, bytes_per_slot: int) -> Outcome:
        """Close the books.

        Raises
        ------
        ItemError
            If the text outgrew the budget and the policy never evicted.
        """
        outcome, budget = self.outcome, self.task.budget
        outcome.eviction = "none" if budget is None else "simulated" if self.simulated else "physical"
        outcome.peak_bytes = None if self.simulated else int(bytes_per_slot * (self.slots - self._spare))
        acts = budget is not None and self.policy.schedule.kind != "never"
        if budget is not None and acts and not outcome.evictions and self.step > budget.total(self.protected):
            before = self.task.reading.length
            raise ItemError(
                "never_evicted",
                f"policy {self.policy.name} never evicted, although {self.step} tokens outgrew a budget of {budget}: "
                f"it acts {self.policy.schedule}, and {self.step - before} tokens came after the first {before}; give "
                "it another schedule, or a smaller budget",
            )
        return outcome
