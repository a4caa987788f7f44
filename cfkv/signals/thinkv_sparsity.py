"""Share of the keys that a query all but ignores (ThinKV's sparsity, methods 1.19)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, found, signal_kinds


@signal_kinds.register
class ThinkvSparsity(CausalSignal):
    """Share of the visible keys with less than 1 % of the row's maximum, mean over the query heads of a KV head."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "share of keys"
    source: ClassVar[str] = "ThinKV, attention sparsity"
    heads: ClassVar[bool] = True

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """One value per row."""
        rows = found(observation.rows, "rows")
        return rows.sparsity_GRB.mean(dim=1), None
