"""EpiKV's attention-times-hidden score, which is a sum of two scaled terms (methods 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from cfkv.policies._avokv import normalised
from cfkv.policies._base import Memory, Seen, State, View, parameters, policy_kinds
from cfkv.policies._born import EPIKV, BornPolicy, band_mean, chosen_layers
from cfkv.policies._common import Count
from cfkv.policies._rolling import rolling_z


@policy_kinds.register
@parameters
class EpikvAttention(BornPolicy):
    """Keep generated tokens that were attended to most and at which layer 10 moved more than usual, one mask."""

    observes: ClassVar[tuple[str, ...]] = ("hidden_diff", "attention")
    state: ClassVar[Mapping[str, float]] = {"score": 0.0, "mass": 0.0}
    frozen: ClassVar[bool] = False
    source: ClassVar[str] = f"{EPIKV}, attention x hidden"
    equation: ClassVar[str] = (
        "s(j) = minmax(sum of a(i, j), mean over layers and heads) + minmax(z_10(j)), both over the candidates"
    )
    deviations: ClassVar[str] = (
        "called a product, printed as a sum; what the minimum is over is printed nowhere"
    )

    rolling: Count = 64
    layers: tuple[int, ...] | None = None

    def observe(self, state: State, seen: Seen) -> None:
        """Attention accumulates, z is one of birth."""
        super().observe(state, seen)
        state.columns["mass"] += seen["attention"].mean(dim=(0, 1)).sum(dim=0)

    def births(self, memory: Memory, seen: Seen, new: Tensor) -> Tensor:
        """z_10."""
        differences = seen["hidden_diff"][:, new]
        chosen = chosen_layers(self.layers, range(10, 11), differences.shape[0], self.name)
        series = band_mean(differences, chosen)[None]
        return rolling_z(memory, "trail", series, self.rolling)[0].float()

    def score(self, view: View) -> Tensor:
        """Both terms weigh the same whatever their scale."""
        read, moved = (normalised(view.state[name], view, "minmax", 1) for name in ("mass", "score"))
        return read + moved
