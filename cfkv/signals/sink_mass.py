"""How much of its attention a query gives to the first tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.signals._base import CausalSignal, Observation, found, signal_kinds


@signal_kinds.register
class SinkMass(CausalSignal):
    """Weight on the first 4 tokens in the token's own attention row, mean over the query heads of a KV head."""

    group: ClassVar[str] = "attention"
    observes: ClassVar[tuple[str, ...]] = ("rows",)
    unit: ClassVar[str] = "attention"
    source: ClassVar[str] = "StreamingLLM, attention sinks"
    heads: ClassVar[bool] = True
    sinks: ClassVar[int] = 4

    def step(self, memory: Tensor | None, observation: Observation) -> tuple[Tensor, None]:
        """One value per row; a sliding window that left the sinks behind gives 0."""
        rows = found(observation.rows, "rows")
        sinks = max(self.sinks - rows.first_key, 0)
        return rows.by_kv_head_GBK[..., :sinks].sum(dim=-1), None
