"""The EpiKV study's H2O: one mask, mean attention (methods 1.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import Policy, Protection, Seen, State, View, parameters, policy_kinds
from cfkv.policies._common import study_window


@policy_kinds.register
@parameters
class H2oGlobal(Policy):
    """Keep 4 sinks, a recent window and the tokens with the most accumulated mean attention, one mask."""

    observes: ClassVar[tuple[str, ...]] = ("attention",)
    state: ClassVar[Mapping[str, float]] = {"mass": 0.0}
    source: ClassVar[str] = "EpiKV (arXiv:2606.26472), its H2O baseline"
    equation: ClassVar[str] = (
        "s(j) = mean over prompt rows + sum over generated rows of a(i, j), mean over layers and heads"
    )
    deviations: ClassVar[str] = "of H2O: one mask for all heads, sinks, the prompt's rows count once together"

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """Sinks and window, at most a quarter of the budget each; the prompt may go."""
        return Protection(sinks=min(4, slots // 4), recent=study_window(slots))

    def observe(self, state: State, seen: Seen) -> None:
        """A prompt's rows weigh 1 / prompt length, so that blocks of any size give their mean."""
        weights = torch.where(seen.generated, 1.0, 1.0 / max(seen.prompt_len, 1))
        state.columns["mass"] += weights.to(state.columns["mass"].device) @ seen["attention"].mean(dim=(0, 1))

    def score(self, view: View) -> Tensor:
        """The mass."""
        return view.state["mass"]
