"""EpiKV's segment hybrid: ThinKV's blocks, hidden states inside (methods 3.5)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._common import Count
from cfkv.policies._segments import Segments, fitting, thirds
from cfkv.policies.epikv import Epikv


@policy_kinds.register
@parameters
class SegmentHybrid(Epikv):
    """Keep up to 64, 32 or 8 tokens of each block of 128, by attention entropy; inside a block rank by EpiKV."""

    needs: ClassVar[tuple[str, ...]] = ("attention",)
    frozen: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    source: ClassVar[str] = f"{EPIKV}, segment hybrid"
    equation: ClassVar[str] = (
        "block type = third of the entropy of a(t, .) within the block; inside, rank by z_10(t) - z_21(t)"
    )

    segment: Count = 128
    last_layers: Count = 4

    def score(self, view: View) -> Tensor:
        """Those within their block's budget first."""
        blocks = Segments(view, self.segment)
        types = thirds(blocks.entropies(view["attention"][-self.last_layers :, :, -1]))
        return blocks.scores(types, view.state["score"])

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """May be fewer than the room."""
        return fitting(room, scores, view)
