"""Spread of key and value on the scale of the partition after them (LagKV, methods 1.13)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import Observation, WholeSignal, present, signal_kinds
from cfkv.signals._lag import lag_spread


@signal_kinds.register
class Lagkv(WholeSignal):
    """Softmax within the partition of the spread, key plus value; NaN where the method has no score.

    Partitions of 128 tokens after 16 sinks; those without a full partition after them, and the sinks, have none.
    """

    group: ClassVar[str] = "kv"
    observes: ClassVar[tuple[str, ...]] = ("cached_keys_GND", "cached_values_GND")
    unit: ClassVar[str] = "share of the partition, of 2"
    source: ClassVar[str] = "LagKV (arXiv:2504.04704), before its ranking within a partition"
    heads: ClassVar[bool] = True
    horizon: ClassVar[int] = 255  # the last token of the next partition
    sinks: ClassVar[int] = 16
    partition: ClassVar[int] = 128

    def whole(self, observation: Observation) -> Tensor:
        """All partitions at once."""
        keys = self.seen(observation)
        values = present(observation.cached_values_GND, "values")
        count = (observation.length - self.sinks) // self.partition
        result = keys.new_full(keys.shape[:2], torch.nan)
        if count >= 2:
            scored = slice(self.sinks, self.sinks + (count - 1) * self.partition)
            result[:, scored] = self._scores(keys, count) + self._scores(values, count)
        return result

    def _scores(self, rows: Tensor, count: int) -> Tensor:
        whole = rows[:, self.sinks : self.sinks + count * self.partition]
        parts = whole.unflatten(1, (count, self.partition))
        own, after = parts[:, :-1], parts[:, 1:]
        low, high = after.amin(dim=2, keepdim=True), after.amax(dim=2, keepdim=True)
        return lag_spread(own, low, high).softmax(dim=-1).flatten(1)
