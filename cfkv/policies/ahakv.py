"""Attention at a temperature that the length does not flatten, times the value's size (AhaKV; methods 1.17)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, Protection, View, parameters, policy_kinds
from cfkv.policies._common import Count, Kernel, pool
from cfkv.policies._heads import by_kv_head
from cfkv.policies._order import Ordered


@policy_kinds.register
@parameters
class Ahakv(Policy):
    """Keep the last 32 tokens and those with the most step-gain attention and large values, per KV head."""

    needs: ClassVar[tuple[str, ...]] = ("keys", "queries", "values")
    mask_scope: ClassVar[MaskScope] = "kv_head"
    source: ClassVar[str] = "AhaKV (arXiv:2506.03762)"
    equation: ClassVar[str] = (
        "s(j) = sum over the last 32 rows of softmax(lambda_i q.k) * pool5 ||v_j||^2 / max, "
        "lambda_i = sqrt(2 log(i / cache) / d)"
    )
    deviations: ClassVar[str] = (
        "lambda is at least 1 / sqrt(d); the pooling kernel is printed nowhere; group mean"
    )

    cache: Count = 1024
    observation: Count = 32
    kernel: Kernel = 5

    @property
    def window(self) -> int:
        """Rows that are summed."""
        return self.observation

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The recent part."""
        return Protection(recent=self.observation)

    def score(self, view: View) -> Tensor:
        """Attention mass times the value prior."""
        keys, values = view["keys"].float(), view["values"].float()
        queries = view["queries"].float().unflatten(1, (keys.shape[1], -1))
        times = torch.arange(view.step - queries.shape[-2], view.step, device=keys.device)
        seen = view.valid[..., None, :] & (view.positions[..., None, :] <= times[:, None])
        gain = step_gain(seen.sum(dim=-1), self.cache, keys.shape[-1])
        logits = torch.einsum("lgrwd,lgsd->lgrws", queries, keys) * gain[:, :, None, :, None]
        rows = logits.masked_fill(~seen[:, :, None], torch.finfo(logits.dtype).min).softmax(dim=-1)
        mass = by_kv_head(rows.sum(dim=-2).flatten(1, 2), keys.shape[1])
        ordered = Ordered(view)
        size = values.square().sum(dim=-1).masked_fill(~view.valid, 0)
        prior = ordered.back(pool(ordered.take(size), self.kernel, "average"))
        return mass * prior / prior.amax(dim=-1, keepdim=True)


def step_gain(visible: Tensor, cache: int, head_dim: int) -> Tensor:
    """lambda: sqrt(2 log(visible / cache) / d), but no less than the usual 1 / sqrt(d)."""
    gain = (2 * (visible.float() / cache).log()).clamp(min=1)
    return (gain / head_dim).sqrt()
