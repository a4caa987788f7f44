"""The segment hybrid without attention: blocks by the spread of their keys (methods 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import Seen, State, View, parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._common import Count
from cfkv.policies._segments import Segments, fitting, thirds
from cfkv.policies.epikv import Epikv


@policy_kinds.register
@parameters
class SegmentHybridKeys(Epikv):
    """Keep up to 64, 32 or 8 tokens of each block of 128, by mean key variance; inside rank by EpiKV."""

    observes: ClassVar[tuple[str, ...]] = ("hidden_diff", "key_variance")
    state: ClassVar[Mapping[str, float]] = {"score": 0.0, "variance": 0.0}
    frozen: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    source: ClassVar[str] = f"{EPIKV}, attention-free segment hybrid"
    equation: ClassVar[str] = (
        "block type = third of the mean Var_d(k) of the block, highest first; inside, rank by z_10(t) - z_21(t)"
    )

    segment: Count = 128

    def observe(self, state: State, seen: Seen) -> None:
        """The key variance of every token, the prompt's too."""
        super().observe(state, seen)
        state.put("variance", seen.slots, seen["key_variance"].mean(dim=(0, 1)))

    def score(self, view: View) -> Tensor:
        """Those within their block's budget first."""
        blocks = Segments(view, self.segment)
        types = thirds(-blocks.means(view.state["variance"]))
        return blocks.scores(types, view.state["score"])

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """May be fewer than the room."""
        return fitting(room, scores, view)
