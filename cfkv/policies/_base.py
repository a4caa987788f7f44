"""The contract of a policy: a pure function from the cache, seen as a table, to a score per slot.

Axis letters: L layers, H query heads, G KV heads, S slots, C new tokens, W query rows, D head dim. Each table of one
sequence has rows [l, g, S]: l = L and g = G where every KV head evicts on its own (mask scope `kv_head`), l = L and
g = 1 for `layer`, l = g = 1 for `global`. Slots are in no order; `positions` says when a token came.

How a loop uses a policy (`_budget.py` selects):

    state = policy.init(rows, slots)                     # once per sequence
    policy.observe(state, seen)                          # after each block of new tokens, prompt included
    if policy.schedule.due(...):
        view = View(..., state=state.columns)
        keep = keep_mask(policy, view, budget)           # evict ~keep in every column; state.reset(...) on reuse
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

import torch
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from cfkv.errors import CfkvError, unknown_name
from cfkv.registry import Registry

__all__ = [
    "Memory",
    "Policy",
    "Protection",
    "Schedule",
    "Seen",
    "State",
    "View",
    "check_scores",
    "make_policy",
    "parameters",
    "policy_kinds",
]

T = TypeVar("T")
MaskScope = Literal["global", "layer", "kv_head"]

# What a policy may declare in `needs`, and how the view holds it.
VIEW_COLUMNS: Mapping[str, str] = {
    "keys": "[L, G, S, D], after the rotary embedding at their absolute positions",
    "raw_keys": "[L, G, S, D], before the rotary embedding",
    "values": "[L, G, S, D]",
    "attention": "[L, H, W, S], the newest `window` query rows (fewer if fewer exist), oldest first: softmax over the "
    "slots that are valid now, 0 where a key is invalid or later than the query",
    "queries": "[L, H, W, D], the same queries after the rotary embedding",
    "label": "[1, 1, S], importance of each token from a label table; NaN where it is untested",
    "shuffled_label": "[1, 1, S], the same with the tested labels dealt out anew among the tested tokens",
}
# What a policy may declare in `observes`. Names that are signals' names are those signals' values.
SEEN_COLUMNS: Mapping[str, str] = {
    "attention": "[L, H, C, S], softmax of the new tokens' rows over the slots; 0 where hidden",
    "hidden_diff": "[L, C], ||h(t) - h(t-1)|| of each block's output; 0 for the first token",
    "key_variance": "[L, G or 1, C], unbiased variance of the key over the head dimension",
    "value_variance": "[L, G or 1, C], the same of the value",
    "key_norm": "[L, G or 1, C], L2 norm of the key",
    "keys": "[L, G, C, D], after the rotary embedding",
    "values": "[L, G, C, D]",
}


class _Columns:
    """Tensors by name; one that was not handed over raises."""

    columns: Mapping[str, Tensor | Callable[[], Tensor]]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise CfkvError(
                f"column {name!r} is not there; a policy gets what its `needs` and `observes` declare, here: "
                f"{', '.join(sorted(self.columns)) or 'none'}"
            )
        column = self.columns[name]
        return column if isinstance(column, Tensor) else column()


@dataclass(frozen=True, kw_only=True)
class View(_Columns):
    """The cache of one sequence at one moment, all layers.

    step : tokens seen so far, so the newest has position step - 1. prompt_len : tokens of the prompt.
    positions int64, valid bool, protected bool : [l, g, S]; an invalid slot holds garbage in every column.
    columns : the declared ones (see VIEW_COLUMNS); a callable is evaluated when it is read.
    state : the policy's own columns, [l, g, S] each. scaling : factor of the dot products.
    seed : of the sequence, for policies that draw.
    """

    step: int
    prompt_len: int
    positions: Tensor
    valid: Tensor
    protected: Tensor
    columns: Mapping[str, Tensor | Callable[[], Tensor]] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    scaling: float = 1.0
    seed: int = 0

    @property
    def evictable(self) -> Tensor:
        """Slots that hold a token and are not protected, [l, g, S]."""
        return self.valid & ~self.protected


@dataclass(frozen=True, kw_only=True)
class Seen(_Columns):
    """New tokens, already written to their slots.

    tokens : their positions, int64 [C], ascending. slots : where each was written, int64 [l, g, C].
    positions, valid : of all slots, these tokens included, [l, g, S]. In a prompt, later rows of the block are
    visible as slots but not to earlier rows.
    columns : the declared ones (see SEEN_COLUMNS).
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    valid: Tensor
    prompt_len: int
    columns: Mapping[str, Tensor | Callable[[], Tensor]] = field(default_factory=dict)
    seed: int = 0

    @property
    def generated(self) -> Tensor:
        """Which of the new tokens are not of the prompt, bool [C]."""
        return self.tokens >= self.prompt_len


Memory = dict[str, Tensor]


@dataclass
class State:
    """What a policy carries from token to token: columns that move with the slots, and memory that does not."""

    columns: dict[str, Tensor]
    fills: Mapping[str, float]
    memory: Memory = field(default_factory=dict)

    def clone(self) -> State:
        """A copy, for another arm that starts from the same prompt."""
        return State(
            {name: column.clone() for name, column in self.columns.items()},
            self.fills,
            {name: tensor.clone() for name, tensor in self.memory.items()},
        )

    def gather(self, slots: Tensor) -> State:
        """The rows at `slots` [l, g, K], as a table of K slots."""
        return State(
            {name: column.gather(-1, slots) for name, column in self.columns.items()}, self.fills, self.memory
        )

    def reset(self, slots: Tensor) -> None:
        """Forget the rows at `slots` [l, g, C] before they are used again."""
        for name, column in self.columns.items():
            column.scatter_(-1, slots, self.fills[name])

    def put(self, name: str, slots: Tensor, values: Tensor) -> None:
        """Write `values` (broadcast to [l, g, C]) at `slots` of a column."""
        self.columns[name].scatter_(-1, slots, values.to(self.columns[name].dtype).expand(slots.shape))


@dataclass(frozen=True, kw_only=True)
class Protection:
    """What is never evicted: the prompt, the first `sinks` tokens, the newest `recent` ones."""

    prompt: bool = False
    sinks: int = 0
    recent: int = 0

    def mask(self, positions: Tensor, valid: Tensor, prompt_len: int, step: int) -> Tensor:
        """Protected slots, shaped like `positions`."""
        first = max(self.sinks, prompt_len if self.prompt else 0)
        return valid & ((positions < first) | (positions >= step - self.recent))

    def count(self, prompt_len: int, step: int) -> int:
        """How many tokens that is, of `step` seen."""
        first = min(max(self.sinks, prompt_len if self.prompt else 0), step)
        return first + min(self.recent, step - first)


@dataclass(frozen=True)
class Schedule:
    """When a policy evicts.

    per_step : whenever the cache is above its budget. every_m : then, at generated tokens that are a multiple of
    `every`; between, the cache grows by as much. segment : the same at the end of each segment of `every` tokens.
    once : after the prompt; what is generated later is never evicted. never : no eviction.
    A prompt above the budget is compressed at its end under every schedule but never.
    """

    kind: Literal["per_step", "every_m", "segment", "once", "never"]
    every: int = 1

    def due(self, generated: int) -> bool:
        """Whether it is time, with that many tokens generated (0: at the end of the prompt)."""
        if self.kind == "never":
            return False
        if generated == 0 or self.kind == "per_step":
            return True
        return self.kind != "once" and generated % self.every == 0

    @property
    def growth(self) -> int:
        """Slots needed above the budget."""
        return self.every if self.kind in ("every_m", "segment") else 1

    def __str__(self) -> str:
        texts = {
            "per_step": "every step",
            "every_m": f"every {self.every} steps",
            "segment": f"every {self.every} tokens",
        }
        return texts.get(self.kind, self.kind)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def parameters(kind: type[T]) -> type[T]:
    """Class decorator of every policy: its fields are parameters, named, validated and never changed."""
    made: Any = pydantic_dataclass(
        frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False)
    )
    return made(kind)


class Policy(ABC):
    """A score per slot, higher = keep. It knows no budget, no model and no label (but the oracles').

    Class attributes
    ----------------
    needs : columns of the view that `score` reads (keys of VIEW_COLUMNS); no other is there.
    observes : columns of the new tokens that `observe` reads (keys of SEEN_COLUMNS).
    mask_scope : who shares a keep set: all layers, the heads of a layer, nobody.
    state : the policy's own columns, name to the value of an unused slot.
    frozen : whether a token's score never changes after its birth, so that stored signals are enough to judge it.
    nested : whether a larger budget keeps everything that a smaller one keeps (false for some allocations).
    ragged : whether layers or KV heads may keep different numbers. Where heads of one layer do, eviction is simulated
        by masks. by_layer : of a ragged policy that acts once, that only layers do: each layer is then cut physically.
    fills : whether an eviction leaves exactly the budget (false for rules that drop more at once).
    compact : whether the method rotates its kept keys to the positions 0, 1, ... of the cache.
    source : paper and section. equation : the score in one line. deviations : from the source, "" if none.

    `window` (query rows that the view's attention holds), `schedule` and `protection` may depend on parameters.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    observes: ClassVar[tuple[str, ...]] = ()
    mask_scope: ClassVar[MaskScope] = "global"
    state: ClassVar[Mapping[str, float]] = {}
    frozen: ClassVar[bool] = False
    nested: ClassVar[bool] = True
    ragged: ClassVar[bool] = False
    by_layer: ClassVar[bool] = False
    fills: ClassVar[bool] = True
    compact: ClassVar[bool] = False
    source: ClassVar[str]
    equation: ClassVar[str]
    deviations: ClassVar[str] = ""
    version: ClassVar[int] = 1

    @property
    def window(self) -> int:
        """Query rows that the view's `attention` and `queries` hold; 0 if it needs none."""
        return 1 if {"attention", "queries"} & set(self.needs) else 0

    @property
    def schedule(self) -> Schedule:
        """When it acts."""
        return Schedule("per_step")

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """What it protects with a budget of `slots` tokens; a few published windows are shares of the budget."""
        return Protection()

    def init(self, rows: tuple[int, int], slots: int, device: torch.device | None = None) -> State:
        """A fresh state for tables [l, g, slots], `rows` = (l, g)."""
        columns = {
            name: torch.full((*rows, slots), fill, dtype=torch.float32, device=device)
            for name, fill in self.state.items()
        }
        return State(columns, self.state)

    def observe(self, state: State, seen: Seen) -> None:
        """Fold new tokens into the state, in place. Blocks of any size give the same state."""
        if self.observes:
            raise NotImplementedError(
                f"policy {self.name} observes {', '.join(self.observes)} and folds nothing"
            )

    @abstractmethod
    def score(self, view: View) -> Tensor:
        """float32 [l, g, S]; finite where valid. Must not depend on the order of the slots."""

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor | None:
        """Unprotected slots that each row may keep, int64 [l, g]; None: `room` each.

        `room` is what the budget leaves beside the protected slots, per row on average.
        """
        return None

    def rows(self, layers: int, kv_heads: int) -> tuple[int, int]:
        """(l, g) of this policy's tables on a model."""
        return (
            1 if self.mask_scope == "global" else layers,
            kv_heads if self.mask_scope == "kv_head" else 1,
        )


policy_kinds: Registry[Policy] = Registry("policy", "cfkv.policies")


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """The policy called `name` with its parameters set.

    Raises
    ------
    CfkvError
        For an unknown name or parameter (with the nearest), or an illegal value.
    """
    kind: Any = policy_kinds.get(name)
    options = dict(options or {})
    legal = [each.name for each in fields(kind)]
    for key in options:
        if key not in legal:
            raise (
                unknown_name(f"parameter of policy {name}", key, legal)
                if legal
                else CfkvError(f"policy {name} has no parameters, but {key!r} was given; leave it out")
            )
    try:
        made: Policy = kind(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CfkvError(f"policy {name}: {where} = {first['input']!r}: {first['msg']}") from error
    return made


def check_scores(policy: Policy, view: View, scores: Tensor) -> None:
    """Refuse scores of a wrong shape or type, or that are not finite where valid."""
    if scores.shape != view.positions.shape or not scores.dtype.is_floating_point:
        raise CfkvError(
            f"policy {policy.name}: score() returned {scores.dtype} {list(scores.shape)}; its mask scope "
            f"{policy.mask_scope!r} needs floats of shape {list(view.positions.shape)}"
        )
    wrong = view.valid & ~scores.isfinite()
    if bool(wrong.any()):
        raise CfkvError(
            f"policy {policy.name}: {int(wrong.sum())} of {int(view.valid.sum())} scores of valid slots are not "
            f"finite (first value: {scores[wrong][0].item()}); return a finite number for every valid slot"
        )


def missing(policies: Iterable[Policy], given: Iterable[str]) -> list[str]:
    """Columns that some policy needs or observes and that are not among `given`, sorted."""
    wanted = {name for policy in policies for name in (*policy.needs, *policy.observes)}
    return sorted(wanted - set(given))
