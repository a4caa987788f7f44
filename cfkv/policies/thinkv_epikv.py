"""The EpiKV study's adaptation of ThinKV (methods 1.19)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Policy, Protection, View, parameters, policy_kinds
from cfkv.policies._common import Count, study_window
from cfkv.policies._segments import Segments, fitting, thirds


@policy_kinds.register
@parameters
class ThinkvEpikv(Policy):
    """Keep up to 64, 32 or 8 tokens of each block of 128, by the entropy of its attention, oldest block first."""

    needs: ClassVar[tuple[str, ...]] = ("attention",)
    fills: ClassVar[bool] = False
    source: ClassVar[str] = "EpiKV (arXiv:2606.26472), its ThinKV baseline"
    equation: ClassVar[str] = (
        "block type = third of the entropy of a(t, .) within the block; inside, rank by the last layer's a(t, j)"
    )
    deviations: ClassVar[str] = (
        "of ThinKV: types by entropy and by thirds of the cache, fixed budgets, no ladder"
    )

    segment: Count = 128
    last_layers: Count = 4

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The recent window; the prompt may go."""
        return Protection(recent=study_window(slots))

    def score(self, view: View) -> Tensor:
        """Those within their block's budget first."""
        row = view["attention"][:, :, -1]
        blocks = Segments(view, self.segment)
        types = thirds(blocks.entropies(row[-self.last_layers :]))
        return blocks.scores(types, row[-1:].mean(dim=1, keepdim=True))

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """Only those within their block's budget are kept, which may be fewer than the room."""
        return fitting(room, scores, view)
