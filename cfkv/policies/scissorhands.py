"""Tokens that are seldom unimportant (Scissorhands, arXiv:2305.17118; methods 1.5)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, Protection, View, parameters, policy_kinds
from cfkv.policies._common import Count, Share
from cfkv.policies._heads import by_kv_head


@policy_kinds.register
@parameters
class Scissorhands(Policy):
    """Drop half of the cache at once: the tokens most often below uniform attention, per KV head."""

    needs: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    fills: ClassVar[bool] = False
    source: ClassVar[str] = "Scissorhands (arXiv:2305.17118)"
    equation: ClassVar[str] = "s(j) = -number of the last 400 rows i >= j with a(i, j) < 1 / visible keys"
    deviations: ClassVar[str] = "mean over a KV head's query heads; rows are over the slots that are left"

    history: Count = 400
    drop: Share = 0.5
    recent: Count = 10

    @property
    def window(self) -> int:
        """Rows that are counted, if there are as many."""
        return self.history

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The newest few."""
        return Protection(recent=self.recent)

    def score(self, view: View) -> Tensor:
        """Rows before a token was there do not count against it."""
        rows = by_kv_head(view["attention"], view.positions.shape[1])
        times = torch.arange(view.step - rows.shape[-2], view.step, device=rows.device)
        seen = view.valid[..., None, :] & (view.positions[..., None, :] <= times[:, None])
        unimportant = seen & (rows < 1 / seen.sum(dim=-1, keepdim=True).clamp(min=1))
        return -unimportant.sum(dim=-2).float()

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """The budget less what is dropped with it."""
        protected, length = (mask.sum(dim=-1) for mask in (view.protected & view.valid, view.valid))
        dropped = ((room + protected) * self.drop).long()
        return torch.where(length > room + protected, (room - dropped).clamp(min=0), room)
