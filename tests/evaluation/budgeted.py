"""What the tests of the loop share: policies that fit a short text, and the slow reference of a decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cfkv.evaluation._reading import Reading
from cfkv.evaluation._row import Outcome, Task
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import Policy, make_policy, policy_kinds
from cfkv.policies._budget import Budget

# Parameters that make published block lengths act in a text of a hundred tokens.
SMALL: dict[str, dict[str, Any]] = {
    "lagkv": {"sinks": 4, "lag": 16},
    "lagkv_rank": {"sinks": 4, "lag": 16},
    "epikv_lag_key": {"chunk": 16},
    "epikv_lag_kv": {"chunk": 16},
    "thinkv_epikv": {"segment": 16},
    "thinkv_original": {"segment": 16, "ladder": (8, 6, 4, 3, 2)},
    "segment_hybrid": {"segment": 16},
    "segment_hybrid_keys": {"segment": 16},
    "manifoldkv_windowed": {"length": 32},
    "ahakv": {"cache": 20},
}
TIE = 1e-4
PROMPT, CONTEXT, TOTAL, SLOTS = 40, 80, 110, 60


def small(name: str) -> Policy:
    """A policy that evicts within TOTAL tokens."""
    options = dict(SMALL.get(name, {}))
    if "every" in {field.name for field in fields(policy_kinds.get(name))}:  # type: ignore[arg-type]
        options["every"] = 16
    return make_policy(name, options)


def draw(loaded: LoadedModel, length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(9, loaded.shape.vocabulary, (length,), generator=generator).tolist()


def distinct(loaded: LoadedModel, length: int, seed: int = 1) -> list[int]:
    """No token comes twice: the first layer's keys or values of two would tie but for rounding; ranks jump there."""
    generator = torch.Generator().manual_seed(seed)
    return (9 + torch.randperm(loaded.shape.vocabulary - 9, generator=generator)).tolist()[:length]


def read(
    loaded: LoadedModel,
    policies: Sequence[Policy],
    ids: Sequence[int],
    stop: int,
    chunk_size: int = 512,
    prompt: int = PROMPT,
) -> Reading:
    reading = Reading(
        loaded, policies, list(ids[:stop]), prompt_len=min(prompt, stop), chunk_size=chunk_size, seed=11
    )
    reading.read_to(stop)
    return reading


def never_stop(ids: list[int]) -> str | None:
    return None


def labels(length: int) -> Tensor:
    values = torch.rand(length, generator=torch.Generator().manual_seed(5))
    values[:PROMPT] = torch.nan
    return values


def task(reading: Reading, index: int, ids: Sequence[int], budget: Budget | None, **options: Any) -> Task:
    """Feed the rest of `ids` after the reading."""
    return Task(
        **{
            "reading": reading,
            "index": index,
            "budget": budget,
            "fed": ids[reading.length :],
            "stop": never_stop,
            "labels": labels(len(ids)),
            **options,
        }
    )


def visible(outcome: Outcome, loaded: LoadedModel, start: int, total: int) -> Tensor:
    """What each query saw, by the keep sets that were recorded: bool [L, G, T, T]; the reading saw all before it."""
    layers, heads = loaded.shape.num_layers, loaded.shape.num_kv_heads
    seen = torch.ones(total, total, dtype=torch.bool).tril().expand(layers, heads, -1, -1).clone()
    for keep in outcome.keep_sets:
        gone = torch.ones(total, dtype=torch.bool)
        gone[keep.kept] = False
        gone[keep.step :] = False
        layer = slice(None) if keep.layer < 0 else slice(keep.layer, keep.layer + 1)
        head = slice(None) if keep.kv_head < 0 else slice(keep.kv_head, keep.kv_head + 1)
        block = seen[layer, head, max(keep.step, start) :]
        block &= ~gone
    return seen


def masked_logits(loaded: LoadedModel, ids: Sequence[int], seen: Tensor) -> Tensor:
    """Logits of one forward over all tokens in which each query sees what `seen` [L, G, T, T] says: [T, vocabulary]."""
    group = loaded.shape.num_heads // loaded.shape.num_kv_heads
    windows = compat.layer_windows(loaded.model)
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    masks: dict[int, Any] = {}
    for layer, window in enumerate(windows):
        own = seen[layer] if window is None else seen[layer] & (distance < window)
        masks[layer] = own.repeat_interleave(group, dim=0)[None]
        if loaded.attn_implementation == "eager":
            masks[layer] = torch.zeros(masks[layer].shape).masked_fill(
                ~masks[layer], torch.finfo(torch.float32).min
            )
    positions = torch.arange(len(ids))
    whole = compat.masks_from_positions(loaded.model, positions, positions)
    with torch.inference_mode():
        return compat.forward(
            loaded.model,
            torch.tensor([list(ids)]),
            compat.new_cache(),
            attention_mask=whole,
            layer_masks=masks,
        )[0]


def keep_sets(outcome: Outcome) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """All of them: layer, KV head, step, positions."""
    return [(keep.layer, keep.kv_head, keep.step, tuple(keep.kept)) for keep in outcome.keep_sets]


def same_tokens(found: Outcome, expected: Outcome, what: str) -> bool:
    """Whether the tokens are the same; they may differ only where a margin below TIE excuses it."""
    if found.token_ids == expected.token_ids:
        return True
    assert min(found.min_margin, expected.min_margin) < TIE, (
        f"{what}: {found.token_ids} instead of {expected.token_ids}"
    )
    return False
