"""Leave-one-out eviction KL: packed replay against token by token, and against a plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from cfkv.bench._base import Bench, Measured, benches, timed
from cfkv.bench._peak import peak_bytes
from cfkv.bench._texts import worked_items
from cfkv.config import BenchConfig
from cfkv.labels._memory import budget, entry_bytes, queries_at_once
from cfkv.labels._packed import Block, Tally, divergence, literal_logprobs, packed_logprobs
from cfkv.labels._scope import Scope
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.slots import SlotCache
from cfkv.models.tokens import encode

ROUNDS = 4


@benches.register
class Oracle(Bench):
    """How much faster is packed replay of single removals, and what of the machine does it use?"""

    model: ClassVar[str] = "smollm2"

    @torch.inference_mode()
    def run(self, loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
        """Prefix 512, 64 single removals, horizon 8 unless told otherwise."""
        prefix, horizon, width = config.prefix, config.horizon, config.candidates
        ids = text_ids(loaded, 4 * prefix + horizon)
        cache = filled(loaded, ids[:prefix], room=(width + 2) * horizon)
        tokens = ids[prefix : prefix + horizon]
        blocks = [(place, place + 1) for place in range(0, prefix, max(1, prefix // width))][:width]
        scope = Scope.parse("all", "all", loaded.shape)
        tally = Tally()
        pack = max(1, queries_at_once(loaded, prefix, budget(loaded, None), config.chunk_size) // horizon)
        fast: list[Tensor] = []
        slow: list[Tensor] = []

        def packed() -> None:
            fast.clear()
            tally.forwarded = 0
            reference = plain_logprobs(loaded, cache, tokens)
            tally.forwarded += horizon
            for first in range(0, width + 1, pack):
                removals = [[block] for block in [(0, 0), *blocks][first : first + pack]]
                found = packed_logprobs(loaded, cache, tokens, removals, scope, tally)
                fast.extend(divergence(reference, each).mean() for each in found)

        def literal(some: Sequence[Block]) -> None:
            reference = literal_logprobs(loaded, cache, tokens, [], scope)
            for block in some:
                without = literal_logprobs(loaded, cache, tokens, [block], scope)
                slow.append(divergence(reference, without).mean())

        queries = torch.tensor([ids[: (width + 2) * horizon]], device=loaded.device)

        def plain() -> None:
            bare = SlotCache(loaded.shape.num_layers, queries.shape[1])
            for first in range(0, queries.shape[1], config.chunk_size):
                compat.forward(loaded.model, queries[:, first : first + config.chunk_size], bare)

        for call in (packed, plain):  # the first call allocates
            call()
        times: dict[str, list[float]] = {"packed": [], "plain": [], "literal": []}
        share = -(-width // ROUNDS)
        for turn in range(ROUNDS):
            times["packed"].append(timed(packed, loaded.device)[1])
            times["plain"].append(timed(plain, loaded.device)[1])
            some = blocks[turn * share : (turn + 1) * share]
            times["literal"].append(timed(partial(literal, some), loaded.device)[1])
        fast_s, plain_s = (sorted(times[name])[ROUNDS // 2] for name in ("packed", "plain"))
        # The references of the rounds but one are an extra of the bench, not of the method.
        slow_s = sum(times["literal"]) * (width + 1) / (width + ROUNDS)
        speed, bare = tally.forwarded / fast_s, queries.shape[1] / plain_s
        gap = max(float((a - b).abs()) for a, b in zip(fast[1:], slow, strict=True))
        return [
            Measured("times step by step", slow_s / fast_s, "x", 15, "higher"),
            Measured("tokens per second / plain forward", speed / bare, "ratio", 0.7, "higher"),
            Measured("packed replay", fast_s, "s"),
            Measured("step by step", slow_s, "s"),
            Measured("forwarded", tally.forwarded, "tokens"),
            Measured("lower bound: these tokens at the plain speed", tally.forwarded / bare, "s"),
            Measured("packed replay, speed", speed, "tokens/s"),
            Measured("plain forward with all logits, speed", bare, "tokens/s"),
            Measured(
                "largest difference of KL",
                gap,
                "nats",
                1e-5 if loaded.dtype == torch.float32 else None,
                "lower",
            ),
            *memory(loaded, ids, config),
        ]


def memory(loaded: LoadedModel, ids: Sequence[int], config: BenchConfig) -> list[Measured]:
    """Peak beyond the cache, for half the candidates, all of them, and all of them on a prefix four times as long."""
    scope = Scope.parse("all", "all", loaded.shape)

    def peak(prefix: int, width: int) -> int:
        cache = filled(loaded, ids[:prefix], room=width * config.horizon)
        removals = [[(place, place + 1)] for place in range(width)]
        tokens = ids[prefix : prefix + config.horizon]
        return peak_bytes(lambda: packed_logprobs(loaded, cache, tokens, removals, scope), loaded.device)

    width, prefix = config.candidates, config.prefix
    half, whole, long = peak(prefix, width // 2), peak(prefix, width), peak(4 * prefix, width)
    copied = 3 * prefix * entry_bytes(loaded)
    return [
        Measured("peak memory, half the candidates", half / 2**20, "MiB"),
        Measured("peak memory, all candidates", whole / 2**20, "MiB"),
        Measured("peak memory, prefix four times as long", long / 2**20, "MiB"),
        Measured(
            "growth with the prefix / the cache it would copy",
            (long - whole) / copied,
            "ratio",
            0.25,
            "lower",
        ),
    ]


def plain_logprobs(loaded: LoadedModel, cache: SlotCache, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities of the tokens that follow, nothing removed; the cache is left as it was."""
    held = compat.cache_length(cache)
    logits = compat.forward(loaded.model, torch.tensor([list(tokens)], device=loaded.device), cache)[0]
    cache.truncate(held)
    return logits.log_softmax(dim=-1)


def filled(loaded: LoadedModel, ids: Sequence[int], room: int) -> SlotCache:
    """A cache of `ids` with room for more."""
    cache = SlotCache(loaded.shape.num_layers, len(ids) + room)
    for first in range(0, len(ids), 512):
        piece = torch.tensor([list(ids[first : first + 512])], device=loaded.device)
        compat.forward(loaded.model, piece, cache, logits_to_keep=1)
    return cache


def text_ids(loaded: LoadedModel, count: int) -> list[int]:
    """Tokens of the bench's own worked problems, over and over, within the model's positions."""
    limit = loaded.shape.max_positions
    text = "\n".join(f"{item.question}\n{item.solution}" for item in worked_items())
    ids = encode(loaded.tokenizer, text)
    return (ids * (count // len(ids) + 1))[: min(count, limit)]
