"""How far the heads of a layer agree on which tokens matter (PAGE, methods 4), and the statistics it was held against.

Axis letters: H query heads, G KV heads, K keys (tokens of the input), L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerAgreement:
    """One layer of one input.

    agreement : mean Jaccard index of the heads' top sets over the pairs; NaN where there is no pair.
    entropy : of the mean row, over the log of the number of keys. top_mass, max_share : of the mean row.
    key_norm_spread : standard deviation over mean of the key norms. All but `agreement` are means over heads.
    """

    agreement: float
    n_pairs: int
    entropy: float
    top_mass: float
    max_share: float
    key_norm_spread: float


@dataclass(frozen=True)
class GateSignals:
    """One input: the two drop conventions, PAGE's rivals, and the agreement of random sets."""

    drop: float
    drop_strict: float
    entropy: float
    top_mass: float
    max_share: float
    key_norm_spread: float
    entropy_drop: float
    floor: float


def top_sets(rows_HK: Tensor, top: int) -> Tensor:
    """Places of the `top` largest of each row, [H, top]; ties by the lower place."""
    return rows_HK.sort(dim=-1, descending=True, stable=True).indices[:, :top]


def jaccard(sets_HT: Tensor, count: int) -> Tensor:
    """[H, H] Jaccard index of all pairs of sets of places below `count`; one product, no loop over pairs."""
    member = torch.zeros(sets_HT.shape[0], count, device=sets_HT.device).scatter_(1, sets_HT, 1.0)
    both = member @ member.T
    return both / (2 * sets_HT.shape[1] - both)


def head_pairs(heads: int, number: int | None, seed: Sequence[int]) -> np.ndarray:
    """[pairs, 2]: all pairs of heads, or `number` of them drawn without replacement, the same for every input."""
    pairs = np.array(list(combinations(range(heads), 2)), dtype=np.int64).reshape(-1, 2)
    if number is None or number >= len(pairs):
        return pairs
    return pairs[np.sort(np.random.default_rng(list(seed)).choice(len(pairs), number, replace=False))]


def layer_agreement(rows_HK: Tensor, keys_GKD: Tensor, pairs: np.ndarray, top: int) -> LayerAgreement:
    """Reduce the mean attention rows of a layer's heads, and its keys."""
    count = rows_HK.shape[1]
    size = min(top, count)
    sets = top_sets(rows_HK, size)
    index = torch.from_numpy(pairs).to(rows_HK.device)
    indices = jaccard(sets, count)[index[:, 0], index[:, 1]]
    entropy = torch.special.entr(rows_HK).sum(dim=-1) / np.log(count) if count > 1 else rows_HK.new_zeros(1)
    norms = keys_GKD.float().norm(dim=-1)
    spread = norms.std(dim=-1, correction=0) / norms.mean(dim=-1)
    numbers = torch.stack(
        [
            indices.mean(),
            entropy.mean(),
            rows_HK.gather(1, sets).sum(dim=-1).mean(),
            rows_HK.amax(dim=-1).mean(),
            spread.mean(),
        ]
    )
    agreement, *others = (float(number) for number in numbers.cpu())
    return LayerAgreement(agreement, len(pairs), *others)


def drop(values: Sequence[float], bins: int = 3) -> float:
    """Mean over the first bin of layers less that over the last, bins of equal size: floor(L / bins) layers."""
    size = len(values) // bins
    return _mean(values[:size]) - _mean(values[len(values) - size :])


def drop_strict(values: Sequence[float], bins: int = 3) -> float:
    """As `drop`, with the last bin from floor((bins - 1) L / bins) on: one layer more where L is no multiple."""
    return _mean(values[: len(values) // bins]) - _mean(values[(bins - 1) * len(values) // bins :])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def gate_signals(layers: Sequence[LayerAgreement], tokens: int, top: int, bins: int = 3) -> GateSignals:
    """Reduce the layers of one input."""
    agreements = [layer.agreement for layer in layers]
    size = min(top, tokens)
    return GateSignals(
        drop=drop(agreements, bins),
        drop_strict=drop_strict(agreements, bins),
        entropy=_mean([layer.entropy for layer in layers]),
        top_mass=_mean([layer.top_mass for layer in layers]),
        max_share=_mean([layer.max_share for layer in layers]),
        key_norm_spread=_mean([layer.key_norm_spread for layer in layers]),
        entropy_drop=drop([layer.entropy for layer in layers], bins),
        floor=size / (2 * tokens - size),
    )
