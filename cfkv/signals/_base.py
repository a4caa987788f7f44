"""The contract of a signal: a fold `init -> update(observation) -> read`, one state per layer.

Axis letters in names: C tokens of a chunk, N tokens so far, H query heads, G KV heads, D head dim, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from cfkv.registry import Registry
from cfkv.signals._logits import LogitRows
from cfkv.signals._rows import AttentionRows
from cfkv.signals._tokens import TokenFacts

T = TypeVar("T")

# Horizon of a value that depends on every later token of the trace.
TO_END = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one layer (or the model's ends) shows of tokens start..stop-1. What nobody observes is None.

    start, stop : the tokens seen now, as indices into the trace; `length` : tokens of the whole trace.
    hidden_CE : residual stream after the block (of the embedding for layer -1), before any final norm.
    attention_output_CE, mlp_output_CE : what the block's attention module and its MLP return.
    keys_GCD, values_GCD : what the cache got, keys after the rotary embedding; `raw_keys_GCD` before it.
    cached_keys_GND, cached_values_GND : everything cached so far, these tokens included.
    queries_HCD : after the rotary embedding; the heads of one KV head are neighbours.
    rows : attention of a block of query rows to all keys so far.
    logits : the model's distributions, one row per token that has a successor.
    tokens : ids, classes and spans.
    """

    start: int
    stop: int
    length: int
    hidden_CE: Tensor | None = None
    attention_output_CE: Tensor | None = None
    mlp_output_CE: Tensor | None = None
    keys_GCD: Tensor | None = None
    values_GCD: Tensor | None = None
    raw_keys_GCD: Tensor | None = None
    cached_keys_GND: Tensor | None = None
    cached_values_GND: Tensor | None = None
    queries_HCD: Tensor | None = None
    rows: AttentionRows | None = None
    logits: LogitRows | None = None
    tokens: TokenFacts | None = None

    @property
    def last(self) -> bool:
        """Whether the trace ends here."""
        return self.stop == self.length


class Signal(ABC):
    """A number per token, layer and possibly KV head.

    Class attributes
    ----------------
    group : the partition it is stored in; the groups of one command are probed in one pass.
    observes : fields of the observation that it reads; nothing else is computed for it.
    unit : unit of the values. source : paper and section.
    layered : whether each layer has values of its own; otherwise the layer is null in the table.
    embedding : whether it exists for the embedding output (layer -1).
    heads : whether each KV head has values of its own (query heads are averaged over their group).
    horizon : later tokens that a value may depend on; 0 = causal, TO_END = all of them.
    """

    name: ClassVar[str]
    group: ClassVar[str]
    observes: ClassVar[tuple[str, ...]]
    unit: ClassVar[str]
    source: ClassVar[str]
    layered: ClassVar[bool] = True
    embedding: ClassVar[bool] = False
    heads: ClassVar[bool] = False
    horizon: ClassVar[int] = 0
    version: ClassVar[int] = 1

    def seen(self, observation: Observation) -> Tensor:
        """The first field that the signal observes, in float32."""
        return present(getattr(observation, self.observes[0]), self.observes[0])

    @abstractmethod
    def init(self) -> Any:
        """A fresh state for one layer of one trace."""

    @abstractmethod
    def update(self, state: Any, observation: Observation) -> Any:
        """The state after more tokens; may change `state` in place. Keeps no [C, E] tensor."""

    @abstractmethod
    def read(self, state: Any) -> Tensor:
        """float32 [G or 1, N]: the value of each token so far, per KV head or one row."""


@dataclass
class Emitted:
    """State of a causal signal: room for the whole trace, filled so far to `seen`, and what the next chunk needs.

    One allocation per trace: small ones among a forward's large ones would fragment the heap.
    """

    values: Tensor | None = None
    seen: int = 0
    memory: Tensor | None = None


class CausalSignal(Signal):
    """A signal whose values are final as soon as their chunk was seen."""

    def init(self) -> Emitted:
        """Nothing seen."""
        return Emitted()

    def update(self, state: Emitted, observation: Observation) -> Emitted:
        """Write the chunk's values behind those before, in place."""
        values, state.memory = self.step(state.memory, observation)
        if state.values is None:
            shape = (values.shape[0], observation.length)
            state.values = torch.empty(shape, dtype=torch.float32, device=values.device)
        stop = state.seen + values.shape[1]
        state.values[:, state.seen : stop] = values
        state.seen = stop
        return state

    def read(self, state: Emitted) -> Tensor:
        """The values so far."""
        return found(state.values, "values")[:, : state.seen]

    @abstractmethod
    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, Tensor | None]:
        """Values [G or 1, C] of a chunk, and what to hand to the next chunk; `memory` is None at first."""


class WholeSignal(Signal):
    """A signal of the finished trace, computed when its last token was seen; looks ahead to the end."""

    horizon: ClassVar[int] = TO_END

    def init(self) -> Tensor | None:
        """Nothing computed."""
        return None

    def update(self, state: Tensor | None, observation: Observation) -> Tensor | None:
        """Compute at the end."""
        return self.whole(observation).float() if observation.last else None

    def read(self, state: Tensor | None) -> Tensor:
        """The values."""
        if state is None:
            raise RuntimeError("read before the last token of the trace was seen")
        return state

    @abstractmethod
    def whole(self, observation: Observation) -> Tensor:
        """Values [G or 1, N] of all tokens, from what is cached."""


def present(tensor: Tensor | None, what: str) -> Tensor:
    """The tensor in float32, if it is there."""
    return found(tensor, what).float()


def found(value: T | None, what: str) -> T:
    """The value; a missing one is a mistake of the engine, not of the user."""
    if value is None:
        raise RuntimeError(
            f"the observation has no {what}; the signal's `observes` does not fit what it reads"
        )
    return value


def horizon_text(horizon: int) -> str:
    """A horizon for people: `yes` for a causal signal, else how far it looks."""
    if horizon == 0:
        return "yes"
    return "looks ahead to the end" if horizon == TO_END else f"looks ahead {horizon}"


signal_kinds: Registry[Signal] = Registry("signal", "cfkv.signals")
