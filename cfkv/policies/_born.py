"""Policies whose score is fixed when a generated token is written (EpiKV's family, methods 3)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.policies._base import Memory, Policy, Protection, Seen, State, View
from cfkv.policies._common import prompt_and_window, scaled_layer

EPIKV = "EpiKV (arXiv:2606.26472)"


class BornPolicy(Policy):
    """One number per generated token; the prompt is protected and has 0. One mask for all layers."""

    state: ClassVar[Mapping[str, float]] = {"score": 0.0}
    frozen: ClassVar[bool] = True

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt and the study's recent window."""
        return prompt_and_window(slots)

    def observe(self, state: State, seen: Seen) -> None:
        """Series run over generated tokens and are never pruned by eviction."""
        new = seen.generated
        if bool(new.any()):
            state.put("score", seen.slots[..., new], self.births(state.memory, seen, new))

    @abstractmethod
    def births(self, memory: Memory, seen: Seen, new: Tensor) -> Tensor:
        """Scores of the tokens that `new` marks."""

    def score(self, view: View) -> Tensor:
        """As it was at birth."""
        return view.state["score"]


def chosen_layers(asked: tuple[int, ...] | None, reference: range, layers: int, name: str) -> list[int]:
    """Layers that were asked for, or those of a 32-layer model at the same depth, ends included.

    Raises
    ------
    CfkvError
        If a layer does not exist.
    """
    if asked is None:
        first, last = (scaled_layer(layer, layers) for layer in (reference[0], reference[-1]))
        return list(range(first, last + 1))
    wrong = [layer for layer in asked if not 0 <= layer < layers]
    if wrong or not asked:
        raise CfkvError(
            f"policy {name}: layers {list(asked)} of a model with {layers}; legal: 0 to {layers - 1}, at least one"
        )
    return list(asked)


def band_mean(differences: Tensor, layers: list[int]) -> Tensor:
    """Mean of [L, C] over some layers, [C], in double precision: rolling sums lose digits otherwise."""
    return differences[torch.tensor(layers, device=differences.device)].double().mean(dim=0)
