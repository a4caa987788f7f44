"""How much a key repeats others (R-KV's redundancy before its softmax, methods 1.21)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.signals._base import Observation, WholeSignal, signal_kinds
from cfkv.signals._pairs import cosine_blocks


@signal_kinds.register
class KeyRedundancy(WholeSignal):
    """Mean over all keys of their cosine to this one, its newest near-duplicate exempt from it.

    A key's own cosine counts 0, and each key leaves out its cosine to the last key above 0.5. The softmax over
    positions that R-KV adds is monotone within a head and depends on the length. A key without any other above 0.5
    leaves out its cosine to the first key in the authors' code (`artefact`); here it leaves out none.
    """

    group: ClassVar[str] = "kv_pairwise"
    observes: ClassVar[tuple[str, ...]] = ("cached_keys_GND",)
    unit: ClassVar[str] = "mean cosine"
    source: ClassVar[str] = "R-KV, redundancy"
    heads: ClassVar[bool] = True
    threshold: ClassVar[float] = 0.5
    artefact: ClassVar[bool] = False

    def whole(self, observation: Observation) -> Tensor:
        """Sums of columns, over blocks of rows."""
        keys = self.seen(observation)
        sums = torch.zeros_like(keys[..., 0])
        numbers = torch.arange(1, keys.shape[1] + 1, device=keys.device, dtype=keys.dtype)
        for start, cosines in cosine_blocks(keys):
            cosines.diagonal(offset=start, dim1=1, dim2=2).zero_()
            last = ((cosines > self.threshold) * numbers).amax(dim=-1, keepdim=True).long()
            place = (last - 1).clamp(min=0)
            keep = torch.zeros_like(last) if self.artefact else last == 0
            cosines.scatter_(-1, place, cosines.gather(-1, place) * keep)
            sums += cosines.sum(dim=1)
        return sums / keys.shape[1]
