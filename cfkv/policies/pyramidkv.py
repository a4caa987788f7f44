"""SnapKV with more room in early layers (PyramidKV, arXiv:2406.02069; methods 1.8)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._common import Count
from cfkv.policies.snapkv import Snapkv


@policy_kinds.register
@parameters
class Pyramidkv(Snapkv):
    """SnapKV whose budget falls linearly from the first layer to the last; acts once."""

    nested: ClassVar[bool] = False
    ragged: ClassVar[bool] = True
    by_layer: ClassVar[bool] = True
    source: ClassVar[str] = "PyramidKV (arXiv:2406.02069), its code"
    equation: ClassVar[str] = (
        "SnapKV's s(j); layer l keeps max - l * step tokens, min = c / 20, max = 2 c - min"
    )
    deviations: ClassVar[str] = "with its floors, the mean over layers is a little above the budget"

    beta: Count = 20

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """The published schedule, the same for all heads of a layer."""
        free = int(view.evictable.sum(dim=-1).max())
        counts = torch.tensor(pyramid(room, free, self.window, scores.shape[0], self.beta))
        return counts.to(scores.device)[:, None].expand(scores.shape[:-1])


def pyramid(room: int, free: int, window: int, layers: int, beta: int) -> list[int]:
    """Tokens per layer beside the window, of `free` candidates, `room` being the mean that is asked for."""
    if free + window < 2 * room or layers == 1:
        return [room] * layers
    least = room // beta
    most = 2 * room - least
    if most > free:
        most, least = free, 2 * room - free
    step = (most - least) // (layers - 1)
    return [most - layer * step for layer in range(layers)]
