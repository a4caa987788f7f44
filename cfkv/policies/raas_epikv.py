"""The EpiKV study's RaaS: one mask, a read is what is at or above the median (methods 1.18)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, Protection, Seen, State, View, parameters, policy_kinds


@policy_kinds.register
@parameters
class RaasEpikv(Policy):
    """Evict the generated token that was last read at the median or above longest ago, one mask."""

    observes: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "global"
    state: ClassVar[Mapping[str, float]] = {"stamp": -1.0}
    source: ClassVar[str] = "EpiKV (arXiv:2606.26472), its RaaS baseline"
    equation: ClassVar[str] = (
        "s(j) = last generated t at which j has the median attention of generated tokens or more, mean over heads"
    )
    deviations: ClassVar[str] = "of RaaS: one mask, the median in place of a level"

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt; no sinks, no recent window."""
        return Protection(prompt=True)

    def observe(self, state: State, seen: Seen) -> None:
        """Half of all tokens share the newest stamp: the tie rule decides much."""
        times = seen.tokens.to(torch.float32)
        state.put("stamp", seen.slots, times)
        if not bool(seen.generated.any()):
            return
        rows, new = seen["attention"].mean(dim=(0, 1))[seen.generated], seen.tokens[seen.generated]
        positions, valid = seen.positions[0, 0], seen.valid[0, 0]
        visible = valid & (positions >= seen.prompt_len) & (positions <= new[:, None])
        median = rows.masked_fill(~visible, torch.nan).nanquantile(0.5, dim=-1, keepdim=True)
        reads = visible & (rows >= median)
        newest = torch.where(reads, new[:, None].float(), -1.0).amax(dim=0)
        state.columns["stamp"] = torch.maximum(state.columns["stamp"], newest)

    def score(self, view: View) -> Tensor:
        """The stamp; among equals the older token goes."""
        return view.state["stamp"]
