"""Values of predictions stand at the token that was predicted, one after the row that predicted it."""

from __future__ import annotations

import torch
from torch import Tensor

from cfkv.signals._base import Observation


def from_second_token(observation: Observation, values: Tensor) -> Tensor:
    """[1, values]; NaN is put first where the trace begins."""
    first = values.new_full((1,), torch.nan)
    return (torch.cat([first, values]) if observation.start == 0 else values)[None]
