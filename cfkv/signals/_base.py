"""The contract of a signal: a fold `init -> update(chunk) -> read`, one state per layer.

Axis letters in names: C tokens of a chunk, N tokens so far, G KV heads, D head dim, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfkv.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one layer shows of one chunk. The fields that a group does not observe are None.

    hidden_CE : residual stream after the block (of the embedding for layer -1), before any final norm.
    keys_GCD, values_GCD : what the cache holds, keys after the rotary embedding.
    """

    hidden_CE: Tensor | None = None
    keys_GCD: Tensor | None = None
    values_GCD: Tensor | None = None


class Signal(ABC):
    """A number per token, layer and possibly KV head.

    Class attributes
    ----------------
    group : the partition it is stored in; groups are probed together.
    observes : "hidden" or "kv": which fields of the observation it reads.
    unit : unit of the values. source : paper and section.
    embedding : whether it exists for the embedding output (layer -1).
    horizon : later tokens that a value may depend on; 0 = causal.
    """

    name: ClassVar[str]
    group: ClassVar[str]
    observes: ClassVar[str]
    unit: ClassVar[str]
    source: ClassVar[str]
    embedding: ClassVar[bool] = False
    horizon: ClassVar[int] = 0
    version: ClassVar[int] = 1

    @abstractmethod
    def init(self) -> Any:
        """A fresh state for one layer of one trace."""

    @abstractmethod
    def update(self, state: Any, observation: Observation) -> Any:
        """The state after one more chunk; reduces the chunk at once and keeps no [C, E] tensor."""

    @abstractmethod
    def read(self, state: Any) -> Tensor:
        """float32 [G or 1, N]: the value of each token so far, per KV head or one row."""


@dataclass(frozen=True)
class Emitted:
    """State of a causal signal: the values of the chunks so far, and what the next chunk needs."""

    values: tuple[Tensor, ...] = ()
    memory: Tensor | None = None


class CausalSignal(Signal):
    """A signal whose values are final as soon as their chunk was seen."""

    def init(self) -> Emitted:
        """Nothing seen."""
        return Emitted()

    def update(self, state: Emitted, observation: Observation) -> Emitted:
        """Append the chunk's values."""
        values, memory = self.step(state.memory, observation)
        return Emitted((*state.values, values.float()), memory)

    def read(self, state: Emitted) -> Tensor:
        """All values."""
        return torch.cat(state.values, dim=-1)

    @abstractmethod
    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, Tensor | None]:
        """Values [G or 1, C] of a chunk, and what to hand to the next chunk; `memory` is None at first."""


def present(tensor: Tensor | None, what: str) -> Tensor:
    """The tensor in float32; a missing one is a mistake of the engine, not of the user."""
    if tensor is None:
        raise RuntimeError(
            f"the observation has no {what}; the signal's `observes` does not fit what it reads"
        )
    return tensor.float()


signal_kinds: Registry[Signal] = Registry("signal", "cfkv.signals")
