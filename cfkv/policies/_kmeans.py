"""Representative vectors of many small sets at once: Lloyd's k-means, then the real one nearest each centroid."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10


def representatives(vectors: Tensor, there: Tensor, count: int) -> Tensor:
    """Rank [N, m] from 0 of each vector of [N, m, D] within its set; the first `count` are the representatives.

    there : bool [N, m], True for the first vectors of a set, which are in the order of time. Representatives of
    larger clusters come first, later ones first among equals; where clusters run empty, the vectors farthest from
    their centroid follow, then the others. Centroids start at tokens evenly spaced in time: nothing is drawn.
    """
    members = there.sum(dim=-1, keepdim=True)
    places = torch.arange(count, device=vectors.device)
    starts = ((places + 0.5) * members / count).long().clamp(max=vectors.shape[1] - 1)
    used = places < members.clamp(
        max=count
    )  # fewer vectors than clusters: the starts repeat, extra ones are unused
    centroids = vectors.gather(1, starts[..., None].expand(-1, -1, vectors.shape[-1]))
    for _ in range(ROUNDS):
        label = _distances(vectors, centroids, used).argmin(dim=-1)
        weights = torch.nn.functional.one_hot(label, count).to(vectors.dtype) * there[..., None]
        sizes = weights.sum(dim=1)
        means = torch.einsum("nmk,nmd->nkd", weights, vectors) / sizes.clamp(min=1)[..., None]
        centroids = torch.where(sizes[..., None] > 0, means, centroids)
    distances = _distances(vectors, centroids, used)
    own, label = distances.min(dim=-1)
    own = own.masked_fill(~there, torch.inf)
    inside = torch.nn.functional.one_hot(label, count).bool() & there[..., None]
    nearest = own[..., None].masked_fill(~inside, torch.inf).argmin(dim=1)  # [N, count]
    filled = inside.any(dim=1)
    chosen = torch.zeros_like(there).scatter_reduce(1, nearest, filled, "amax", include_self=True)
    size = inside.sum(dim=1).gather(1, label)
    order = torch.arange(there.shape[1], device=there.device).flip(0).expand(there.shape)
    for key in (-torch.where(chosen, size.to(own.dtype), own), ~chosen, ~there):
        order = order.gather(1, key.to(own.dtype).gather(1, order).argsort(dim=1, stable=True))
    ranks = torch.arange(there.shape[1], device=there.device).expand(there.shape)
    return torch.empty_like(order).scatter(1, order, ranks)


def _distances(vectors: Tensor, centroids: Tensor, used: Tensor) -> Tensor:
    found = torch.cdist(vectors, centroids, compute_mode="donot_use_mm_for_euclid_dist")
    return found.masked_fill(~used[:, None, :], torch.inf)
