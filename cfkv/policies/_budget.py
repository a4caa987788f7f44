"""Budgets: integers with a unit and a scope, and the one rule that selects what is kept.

Protected slots first, then the higher score, then the later position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.policies._base import Policy, View, check_scores

BudgetScope = Literal["total", "beyond_protected"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many tokens a KV head may keep.

    slots : tokens per KV head. scope : with those that are protected, or beside them.
    asked : what the user wrote, for tables and messages.
    """

    slots: int
    scope: BudgetScope = "total"
    asked: str = ""

    def __post_init__(self) -> None:
        if self.slots < (1 if self.scope == "total" else 0):
            raise CfkvError(
                f"a budget of {self.asked or self.slots} is {self.slots} tokens; raise it to 1 or more"
            )

    def __str__(self) -> str:
        beside = " beside the protected" if self.scope == "beyond_protected" else ""
        asked = f" ({self.asked})" if self.asked else ""
        return f"{self.slots} tokens{beside}{asked}"

    @classmethod
    def of_fraction(cls, fraction: float, tokens: int, scope: BudgetScope = "beyond_protected") -> Budget:
        """`fraction` of `tokens` (of the evictable ones where the scope is beyond_protected), rounded down."""
        if not 0 <= fraction <= 1:
            raise CfkvError(f"a budget of {fraction} is no fraction; legal: 0 to 1 (a count is an integer)")
        # 1e-9: a product such as .29 * 100 = 28.999999999999996 means 29.
        return cls(slots=int(fraction * tokens + 1e-9), scope=scope, asked=f"{fraction:g} of {tokens}")

    @classmethod
    def of_bytes(cls, size: int, bytes_per_token: int, scope: BudgetScope = "total") -> Budget:
        """`size` bytes of keys and values at 2 * layers * KV heads * head dim * bytes a token, rounded down."""
        if size < bytes_per_token:
            raise CfkvError(
                f"a budget of {size} bytes holds no token: one takes {bytes_per_token} bytes; raise it"
            )
        return cls(slots=size // bytes_per_token, scope=scope, asked=f"{size} bytes")

    def room(self, protected: int, length: int) -> int:
        """Unprotected slots that may be kept, of `length` tokens of which `protected` are protected.

        Raises
        ------
        CfkvError
            If something must be evicted and the total is not above what is protected.
        """
        if self.scope == "beyond_protected":
            return self.slots
        if length <= self.slots:
            return length - protected
        if self.slots <= protected:
            raise CfkvError(
                f"a budget of {self.slots} tokens is not above the {protected} that are protected (of {length} "
                f"cached); raise the budget above {protected}, or protect less"
            )
        return self.slots - protected

    def total(self, protected: int) -> int:
        """Slots that a table needs for this budget, between evictions."""
        return self.slots + (protected if self.scope == "beyond_protected" else 0)


def ranked(scores: Tensor, eligible: Tensor, positions: Tensor) -> Tensor:
    """Slots [..., S] from the best to the worst: eligible first, by score, then by later position."""
    by_time = positions.argsort(dim=-1, descending=True, stable=True)
    ordered = scores.masked_fill(~eligible, -torch.inf).gather(-1, by_time)
    by_score = ordered.argsort(dim=-1, descending=True, stable=True)
    order = by_time.gather(-1, by_score)
    # An eligible slot may hold -inf too (another package's policy): eligibility decides, stably.
    late = (~eligible.gather(-1, order)).to(torch.int8).argsort(dim=-1, stable=True)
    return order.gather(-1, late)


def select(
    scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor, counts: int | Tensor
) -> Tensor:
    """Keep mask [..., S]: all valid protected slots and the best `counts` [...] of the others.

    The order of the slots does not matter. Leading axes are free: layers, heads, sequences.
    """
    eligible = valid & ~protected
    order = ranked(scores, eligible, positions)
    places = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    limits = torch.as_tensor(counts, device=scores.device)
    best = places < (limits[..., None] if limits.dim() else limits)
    return (torch.zeros_like(eligible).scatter(-1, order, best) & eligible) | (valid & protected)


def victim(scores: Tensor, positions: Tensor, valid: Tensor, protected: Tensor) -> Tensor:
    """The slot [...] that goes first: lowest score, then earliest position. `select` with one less, but no sort."""
    eligible = valid & ~protected
    lowest = scores.masked_fill(~eligible, torch.inf)
    tied = eligible & (lowest == lowest.amin(dim=-1, keepdim=True))
    latest = torch.iinfo(positions.dtype).max
    return positions.masked_fill(~tied, latest).argmin(dim=-1)


def kept_counts(policy: Policy, view: View, budget: Budget, scores: Tensor) -> int | Tensor:
    """Unprotected slots that each row keeps: the budget's room, shared out by the policy if it does that.

    A cache that fits its budget loses nothing, whatever the policy would share out.
    """
    protected, length = (int(mask.sum(dim=-1).max()) for mask in (view.protected & view.valid, view.valid))
    room = budget.room(protected, length)
    if room >= int(view.evictable.sum(dim=-1).max()):
        return room
    quotas = policy.quotas(room, scores, view)
    return room if quotas is None else quotas


def keep_mask(policy: Policy, view: View, budget: Budget) -> Tensor:
    """Score the view and select: True where a slot stays, [l, g, S]."""
    scores = policy.score(view)
    check_scores(policy, view, scores)
    counts = kept_counts(policy, view, budget, scores)
    return select(scores, view.positions, view.valid, view.protected, counts)
