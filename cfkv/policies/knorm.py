"""Small keys (Knorm, arXiv:2406.11430; methods 1.12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.policies._base import (
    MaskScope,
    Policy,
    Seen,
    State,
    View,
    parameters,
    policy_kinds,
)


@policy_kinds.register
@parameters
class Knorm(Policy):
    """Keep keys of small norm, per KV head."""

    observes: ClassVar[tuple[str, ...]] = ("key_norm",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    state: ClassVar[Mapping[str, float]] = {"norm": 0.0}
    frozen: ClassVar[bool] = True
    source: ClassVar[str] = "Knorm (arXiv:2406.11430)"
    equation: ClassVar[str] = "s(j) = -||k_j||_2"
    deviations: ClassVar[str] = "all layers are compressed; the original leaves the first two (skip_layers)"

    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Layers that keep everything: counts differ, so eviction is simulated.
        object.__setattr__(self, "ragged", bool(self.skip_layers))

    def observe(self, state: State, seen: Seen) -> None:
        """Store the norms."""
        state.put("norm", seen.slots, seen["key_norm"])

    def score(self, view: View) -> Tensor:
        """The negative norm."""
        return -view.state["norm"]

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor | None:
        """Skipped layers keep everything."""
        if not self.skip_layers:
            return None
        layers = scores.shape[0]
        wrong = [layer for layer in self.skip_layers if not 0 <= layer < layers]
        if wrong:
            raise CfkvError(f"policy {self.name}: skip_layers has {wrong[0]}; legal: 0 to {layers - 1}")
        counts = torch.full(scores.shape[:-1], room, dtype=torch.int64, device=scores.device)
        counts[list(self.skip_layers)] = scores.shape[-1]
        return counts
