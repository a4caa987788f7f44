"""How much of its attention a query gives to one key."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, found, signal_kinds


@signal_kinds.register
class AttentionMax(CausalSignal):
    """Largest weight of the token's own attention row, mean over the query heads of a KV head."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "attention"
    source: ClassVar[str] = "PAGE ablation, maximum share, per token"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """One value per row."""
        rows = found(observation.rows, "rows")
        return rows.largest_GRB.mean(dim=1), None
