"""EpiKV's causal LagKV: a spread on the scale of the chunk before (methods 3.4)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cfkv.policies._base import Memory, Policy, Protection, Seen, State, View, parameters
from cfkv.policies._common import Count, prompt_and_window
from cfkv.policies._order import Ordered

EPSILON = 1e-9


@parameters
class LagChunkPolicy(Policy):
    """Chunks of 128 cached tokens; vectors averaged over layers, scores over KV heads. One mask.

    frozen : chunks are of the sequence instead of the cache, and a token keeps the score that it has against the
    original chunk before its own. That chunk is complete when the token is written, so the score is one of birth.
    """

    vectors: ClassVar[tuple[str, ...]]

    chunk: Count = 128
    frozen: bool = False  # type: ignore[misc]

    def __post_init__(self) -> None:
        read, unread = ("observes", "needs") if self.frozen else ("needs", "observes")
        object.__setattr__(self, read, self.vectors)
        object.__setattr__(self, unread, ())
        object.__setattr__(self, "state", {"score": 0.0} if self.frozen else {})

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """The prompt and the study's recent window."""
        return prompt_and_window(slots)

    def observe(self, state: State, seen: Seen) -> None:
        """The score at birth, of the prompt's tokens too: they are reference and first chunk."""
        if self.frozen:
            total = torch.zeros(seen.tokens.shape, device=seen.tokens.device)
            for name in self.vectors:
                rows = seen[name].float().mean(dim=0)
                total = total + streamed(state.memory, name, rows, int(seen.tokens[0]), self.chunk)
            state.put("score", seen.slots, total)

    def score(self, view: View) -> Tensor:
        """Unless frozen, membership of chunks is by rank in the cache: it drifts as tokens go, as in the study."""
        if self.frozen:
            return view.state["score"]
        ordered, length = Ordered(view), int(view.valid.sum())
        total = torch.zeros(view.positions.shape, device=view.positions.device)
        for name in self.vectors:
            rows = ordered.take_vectors(view[name].float().mean(dim=0, keepdim=True))[0]
            total[0, 0, :length] += spreads(rows[:, :length], self.chunk)
        return ordered.back(total)


def spreads(rows: Tensor, chunk: int) -> Tensor:
    """std over channels of [G, n, D], scaled by the previous chunk's range, mean over G; raw in the first chunk."""
    return streamed({}, "rows", rows, 0, chunk)


def streamed(memory: Memory, name: str, rows: Tensor, start: int, chunk: int) -> Tensor:
    """The spread of rows [G, C, D] whose first is token `start`, [C]; `memory` carries the ranges of two chunks."""
    found = []
    for part in rows.split([*_cuts(start, rows.shape[1], chunk)], dim=1):
        if start % chunk == 0 and start > 0:  # the chunk that was being filled is now the one before
            memory[f"{name} before"] = memory[f"{name} now"]
            del memory[f"{name} now"]
        before = memory.get(f"{name} before")
        scaled = part if before is None else (part - before[0]) / (before[1] - before[0] + EPSILON)
        found.append(scaled.std(dim=-1).mean(dim=0))
        low, high = part.amin(dim=1, keepdim=True), part.amax(dim=1, keepdim=True)
        now = memory.get(f"{name} now")
        if now is not None:
            low, high = torch.minimum(low, now[0]), torch.maximum(high, now[1])
        memory[f"{name} now"] = torch.stack([low, high])
        start += part.shape[1]
    return torch.cat(found)


def _cuts(start: int, count: int, chunk: int) -> list[int]:
    """Sizes of the parts of `count` tokens from `start` that lie in one chunk each."""
    ends = [*range((start // chunk + 1) * chunk, start + count, chunk), start + count]
    return [end - begin for begin, end in zip([start, *ends], ends, strict=False)]
