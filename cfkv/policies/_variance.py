"""EpiKV's policies on the spread of the cached vectors (methods 3.3)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from cfkv.policies._base import Memory, Seen, parameters
from cfkv.policies._born import BornPolicy
from cfkv.policies._common import Count
from cfkv.policies._rolling import rolling_mean


@parameters
class VariancePolicy(BornPolicy):
    """Rolling mean of the variance over the head dimension, mean over layers and KV heads; sign 1 keeps high."""

    rolling: Count = 64
    sign: Literal[1, -1] = 1
    column: ClassVar[str]

    def births(self, memory: Memory, seen: Seen, new: Tensor) -> Tensor:
        """One series."""
        series = seen[self.column][..., new].double().mean(dim=(0, 1))[None]
        return self.sign * rolling_mean(memory, "trail", series, self.rolling)[0].float()
