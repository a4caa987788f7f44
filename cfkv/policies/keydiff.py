"""Keys unlike the average direction (KeyDiff, arXiv:2504.15364; methods 1.11)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from cfkv.policies._base import (
    MaskScope,
    Policy,
    Protection,
    Schedule,
    View,
    parameters,
    policy_kinds,
)
from cfkv.policies._common import Count, study_window
from cfkv.policies._keys import mean_vector


@policy_kinds.register
@parameters
class Keydiff(Policy):
    """Keep keys that point away from the mean of the unit keys, per KV head, in blocks of 128 tokens."""

    needs: ClassVar[tuple[str, ...]] = ("keys",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "KeyDiff (arXiv:2504.15364)"
    equation: ClassVar[str] = "s(j) = -cos(k_j, mean over cached i of k_i / ||k_i||)"
    deviations: ClassVar[str] = "a recent window is protected, since new keys shift the anchor"

    recent: int | None = Field(
        None, ge=0, description="Protected; default: the smaller of 128 and budget / 4."
    )
    every: Count = 128

    @property
    def schedule(self) -> Schedule:
        """Blockwise."""
        return Schedule("every_m", self.every)

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The recent window."""
        return Protection(recent=study_window(slots) if self.recent is None else self.recent)

    def anchored(self, keys: Tensor) -> Tensor:
        """What the anchor is the mean of."""
        return normalize(keys, dim=-1)

    def score(self, view: View) -> Tensor:
        """Unlikeness to the anchor."""
        keys = view["keys"].float()
        anchor = normalize(mean_vector(self.anchored(keys), view.valid), dim=-1)
        return -(normalize(keys, dim=-1) * anchor).sum(dim=-1)
