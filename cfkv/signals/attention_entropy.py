"""How widely a query spreads its attention."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, found, signal_kinds


@signal_kinds.register
class AttentionEntropy(CausalSignal):
    """Entropy of the token's own attention row, mean over the query heads of a KV head."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "nats"
    source: ClassVar[str] = "EpiKV, ablation notes: attention entropy"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """One value per row."""
        rows = found(observation.rows, "rows")
        return rows.entropy_GRB.mean(dim=1), None
