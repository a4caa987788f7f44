"""Leave-one-out eviction damage (AvoKV-E, methods 5.3): KL(with || without) over the next tokens.

At checkpoints of the reasoning each block of cached reasoning tokens is removed alone, in all layers and heads,
and the trace's own next tokens are replayed. High damage (the top decile of a trace) is decided in analysis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from cfkv.config import Execution, LabelConfig
from cfkv.errors import ItemError
from cfkv.labels._base import Label, LabelCost, LabelledTrace, LabelTrace, TraceLength, label_kinds
from cfkv.labels._packed import Block, divergence, literal_logprobs, packed_logprobs
from cfkv.labels._windows import token_importance, token_mean
from cfkv.models import compat
from cfkv.schemas import EVICTION_KL, Table


@label_kinds.register
class EvictionKL(Label):
    """Remove single blocks of cached tokens and compare the next tokens' distributions."""

    source: ClassVar[str] = "AvoKV-E, leave-one-out eviction damage"
    unit: ClassVar[str] = "nats, mean over the horizon"
    sign: ClassVar[str] = "positive: evicting the block changes what the model says next"
    table: ClassVar[Table] = EVICTION_KL

    def label(self, trace: LabelTrace) -> LabelledTrace:
        """Replay every block at every checkpoint; a token's value is its mean over the checkpoints.

        The trace's tokens stay untested in `importance`: a threshold is the analyst's.
        """
        steps = checkpoints(trace, self.config.every, self.config.horizon)
        if not steps:
            have = len(trace.token_ids) - trace.reasoning_start
            raise ItemError(
                "too_short",
                f"no checkpoint fits: the first takes every = {self.config.every} tokens of reasoning and horizon = "
                f"{self.config.horizon} after them, and the trace has {have} from the start of its reasoning",
            )
        rows: list[Mapping[str, Any]] = []
        cache = compat.new_cache()
        for step in steps:
            self._extend(cache, trace, step)
            rows += self._rows(trace, cache, step)
        spans = [(row["blocks"][0]["start"], row["blocks"][0]["stop"]) for row in rows]
        total = len(trace.token_ids)
        tokens = {
            "trace_id": trace.trace_id,
            "problem_id": trace.problem_id,
            "kind": self.name,
            "importance": token_importance(total, [], []),
            "value": token_mean(total, spans, [row["kl"] for row in rows]),
            "n_windows": len(rows),
            "status": "labelled",
        }
        return LabelledTrace(rows=rows, tokens=tokens)

    @classmethod
    def cost(cls, config: LabelConfig, execution: Execution, length: TraceLength) -> LabelCost:
        """One prefill, and per checkpoint the horizon token by token once, and once per block in packs."""
        last = min(length.reasoning_stop, length.total - config.horizon)
        steps = range(length.reasoning_start + config.every, last + 1, config.every)
        blocks = [-(-(step - length.reasoning_start) // config.block) for step in steps]
        width = 1 if execution.literal else execution.batch_size
        packs = sum(-(-count // width) for count in blocks)
        forwards = len(steps) * (2 + config.horizon) + packs * (config.horizon if execution.literal else 1)
        tokens = (steps[-1] if steps else 0) + config.horizon * (sum(blocks) + 2 * len(steps))
        return LabelCost(sum(blocks), forwards, tokens)

    def _extend(self, cache: compat.DynamicCache, trace: LabelTrace, step: int) -> None:
        for first in range(compat.cache_length(cache), step, self.execution.chunk_size):
            piece = trace.token_ids[first : min(first + self.execution.chunk_size, step)]
            ids = torch.tensor([piece], device=self.loaded.device)
            compat.forward(self.loaded.model, ids, cache, logits_to_keep=1)

    def _rows(self, trace: LabelTrace, cache: compat.DynamicCache, step: int) -> Iterator[Mapping[str, Any]]:
        tokens = trace.token_ids[step : step + self.config.horizon]
        size, first = self.config.block, trace.reasoning_start
        blocks: list[Block] = [(start, min(start + size, step)) for start in range(first, step, size)]
        reference = literal_logprobs(self.loaded, cache, tokens, (0, 0))
        null_kl = float(
            divergence(reference, packed_logprobs(self.loaded, cache, tokens, [(0, 0)])[0]).mean()
        )
        width = 1 if self.execution.literal else self.execution.batch_size
        for start in range(0, len(blocks), width):
            pack = blocks[start : start + width]
            if self.execution.literal:
                without = literal_logprobs(self.loaded, cache, tokens, pack[0])[None]
            else:
                without = packed_logprobs(self.loaded, cache, tokens, pack)
            for index, (block, damage) in enumerate(
                zip(pack, divergence(reference, without), strict=True), start
            ):
                yield {
                    "trace_id": trace.trace_id,
                    "kind": self.name,
                    "scope": "all",
                    "step": step,
                    "block_index": index,
                    "blocks": [{"start": block[0], "stop": block[1]}],
                    "kl": float(damage.mean()),
                    "kl_by_offset": damage.tolist(),
                    "null_kl": null_kl,
                }


def checkpoints(trace: LabelTrace, every: int, horizon: int) -> list[int]:
    """Steps reasoning_start + every, + 2 every, ... up to the boundary that leave `horizon` tokens to replay."""
    last = min(trace.reasoning_stop, len(trace.token_ids) - horizon)
    return list(range(trace.reasoning_start + every, last + 1, every))
