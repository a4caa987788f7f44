"""Thought types, a ladder of budgets, and k-means inside segments (ThinKV, arXiv:2510.01290; methods 1.19)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import field_validator
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.policies._base import (
    MaskScope,
    Policy,
    Schedule,
    Seen,
    State,
    View,
    parameters,
    policy_kinds,
)
from cfkv.policies._common import Count, Share
from cfkv.policies._kmeans import representatives

NEGLIGIBLE = 0.01  # of the row's maximum
TRANSITION, EXECUTION, REASONING = 0, 1, 2  # from the least important


@policy_kinds.register
@parameters
class ThinkvOriginal(Policy):
    """Segments of 128 tokens step down a ladder when a transition follows; inside, real tokens nearest k centroids."""

    needs: ClassVar[tuple[str, ...]] = ("keys",)
    observes: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "kv_head"
    state: ClassVar[Mapping[str, float]] = {"type": REASONING}
    fills: ClassVar[bool] = False
    nested: ClassVar[bool] = True
    source: ClassVar[str] = "ThinKV (arXiv:2510.01290), eviction alone"
    equation: ClassVar[str] = (
        "a segment of which n later ones are transitions keeps ladder[n - 1] tokens (k-means representatives); over "
        "budget, transition before execution before reasoning, oldest first, down to the last rung"
    )
    deviations: ClassVar[str] = (
        "thresholds and layers are to be calibrated per model (defaults: .5, .8, four layers evenly spaced); the "
        "prompt counts as reasoning; over budget, tokens of small clusters go first; nothing goes while the cache fits "
        "its budget; nothing is quantised"
    )

    segment: Count = 128
    ladder: tuple[int, ...] = (64, 32, 16, 8, 4)
    thresholds: tuple[Share, Share] = (0.5, 0.8)
    layers: tuple[int, ...] | None = None

    @field_validator("ladder")
    @classmethod
    def _falls(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or value[-1] < 1 or list(value) != sorted(set(value), reverse=True):
            raise ValueError("a ladder falls strictly to 1 or more")
        return value

    @field_validator("thresholds")
    @classmethod
    def _rise(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError("the first threshold must not be above the second")
        return value

    @property
    def schedule(self) -> Schedule:
        """At the end of each segment."""
        return Schedule("segment", self.segment)

    def observe(self, state: State, seen: Seen) -> None:
        """Sum the sparsity of each generated row; at the end of a segment, mark its slots with its type."""
        state.put("type", seen.slots, torch.tensor(float(REASONING), device=seen.slots.device))
        if not bool(seen.generated.any()):
            return
        rows = seen["attention"][:, :, seen.generated]
        chosen = torch.tensor(self.chosen(rows.shape[0]), device=rows.device)
        visible = seen.valid[..., None, :] & (
            seen.positions[..., None, :] <= seen.tokens[seen.generated][:, None]
        )
        # Every KV head of a layer holds as many tokens.
        count = visible.sum(dim=-1).expand(rows.shape[0], -1, -1)[chosen].amax(dim=1, keepdim=True)
        used = rows[chosen]
        strong = (used >= NEGLIGIBLE * used.amax(dim=-1, keepdim=True)) & (used > 0)
        sparsity = (1 - strong.sum(dim=-1) / count).double().mean(dim=(0, 1))
        total = state.memory.get("sparsity", sparsity.new_zeros(()))
        for token, value in zip(seen.tokens[seen.generated].tolist(), sparsity, strict=True):
            total = total + value
            if (token - seen.prompt_len + 1) % self.segment == 0:
                kind = self.kind(float(total) / self.segment)
                own = seen.valid & (seen.positions > token - self.segment) & (seen.positions <= token)
                state.columns["type"] = state.columns["type"].masked_fill(own, kind)
                total = torch.zeros_like(total)
        state.memory["sparsity"] = total

    def chosen(self, layers: int) -> list[int]:
        """The calibrated layers."""
        if self.layers is None:
            return sorted({(2 * index + 1) * layers // 8 for index in range(4)})
        wrong = [layer for layer in self.layers if not 0 <= layer < layers]
        if wrong or not self.layers:
            raise CfkvError(
                f"policy {self.name}: layers {list(self.layers)}; legal: 0 to {layers - 1}, at least one"
            )
        return list(self.layers)

    def kind(self, sparsity: float) -> int:
        """Type of a segment by its mean sparsity: execution is the lowest, transition the highest."""
        low, high = self.thresholds
        return TRANSITION if sparsity >= high else REASONING if sparsity >= low else EXECUTION

    def score(self, view: View) -> Tensor:
        """Beyond its rung: below -S. Within: by class, then age, then rank; the last rung of all comes first."""
        keys = view["keys"].float()
        shape = keys.shape[:-1]
        positions, valid = view.positions.expand(shape), view.valid.expand(shape)
        kinds = view.state["type"].expand(shape)
        index = (positions - view.prompt_len).div(self.segment, rounding_mode="floor")
        first = -(-view.prompt_len // self.segment)
        index = index + first  # the prompt's segments are counted back from its end
        last = (view.step - 1 - view.prompt_len) // self.segment + first
        scores = torch.zeros(shape, device=keys.device)
        later = torch.zeros(
            shape[:2], dtype=torch.int64, device=keys.device
        )  # transitions after this segment
        width = view.step + self.segment  # more than any rank or count of tokens
        for place in range(last, -1, -1):
            own = valid & (index == place)
            if bool(own.any()):
                kind = torch.where(own, kinds, REASONING).amin(dim=-1)
                rank = self.ranks(keys, own, positions, later)
                rungs = torch.tensor((self.segment, *self.ladder), device=keys.device)
                target = rungs[later.clamp(max=len(self.ladder))][..., None]
                order = (kind * (last + 1) + place)[..., None] / (3 * (last + 1))
                value = torch.where(rank < self.ladder[-1], 2 + order, order + 1e-9) - rank / (
                    width * 3 * (last + 1)
                )
                value = torch.where(rank < target, value, -1 - rank / width)
                scores = torch.where(own, value.float(), scores)
                later = later + (kind == TRANSITION)
        return scores

    def ranks(self, keys: Tensor, own: Tensor, positions: Tensor, later: Tensor) -> Tensor:
        """Rank of each slot within its segment [L, G, S], at the rung that each head's segment is on."""
        most = int(own.sum(dim=-1).max())
        times = positions.masked_fill(~own, torch.iinfo(positions.dtype).max)
        slots = times.argsort(dim=-1, stable=True)[..., :most]
        vectors = keys.gather(-2, slots[..., None].expand(-1, -1, -1, keys.shape[-1])).flatten(0, 1)
        there = own.gather(-1, slots).flatten(0, 1)
        vectors = vectors.masked_fill(~there[..., None], 0)
        result = torch.zeros_like(there, dtype=torch.int64)
        for rung in sorted(set(later.flatten().tolist())):
            size = self.segment if rung == 0 else self.ladder[min(rung, len(self.ladder)) - 1]
            found = representatives(vectors, there, min(size, most))
            result = torch.where((later.flatten() == rung)[:, None], found, result)
        ranks = result.unflatten(0, own.shape[:2])
        return torch.zeros_like(positions).scatter(-1, slots, ranks)

    def quotas(self, room: int, scores: Tensor, view: View) -> Tensor:
        """Only what is within its rung."""
        return ((scores >= -0.5) & view.evictable).sum(dim=-1).clamp(max=room)
