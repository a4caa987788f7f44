"""Leave-one-out eviction damage (AvoKV-E, methods 5.3): KL(with || without) over the next tokens.

At checkpoints of the reasoning each candidate block of cached tokens is removed alone, or a pair of them
together, and the trace's own next tokens are replayed. High damage (the top decile of a trace) is decided in
analysis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfkv.answers import Matcher
from cfkv.config import Execution, LabelConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.labels._base import Label, LabelCost, LabelledTrace, LabelTrace, TraceLength, label_kinds
from cfkv.labels._candidates import STRATIFIED, Removal, check_listed, content_hash, is_file, listed, removals
from cfkv.labels._memory import budget, queries_at_once
from cfkv.labels._packed import Tally, divergence, literal_logprobs, packed_logprobs
from cfkv.labels._windows import token_importance, token_mean
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.slots import SlotCache
from cfkv.schemas import EVICTION_KL, Table

BOUNDARY = "boundary"
CANDIDATE_OPTIONS = frozenset({"block", "candidates", "age_bands", "per_band", "pairs", "seed"})
CHECKPOINT_OPTIONS = frozenset({"every", "steps", "horizon"})


@label_kinds.register
class EvictionKL(Label):
    """Remove single blocks of cached tokens, or pairs, and compare the next tokens' distributions."""

    source: ClassVar[str] = "AvoKV-E, leave-one-out eviction damage"
    unit: ClassVar[str] = "nats, mean over the horizon"
    sign: ClassVar[str] = "positive: evicting the block changes what the model says next"
    options: ClassVar[frozenset[str]] = CANDIDATE_OPTIONS | CHECKPOINT_OPTIONS | {"layers", "kv_heads"}
    table: ClassVar[Table] = EVICTION_KL
    version: ClassVar[int] = 2

    def __init__(
        self, loaded: LoadedModel, config: LabelConfig, execution: Execution, matcher: Matcher
    ) -> None:
        super().__init__(loaded, config, execution, matcher)
        self.listed = listed(config.candidates) if is_file(config.candidates) else None
        self.tally = Tally()

    @classmethod
    def settings(cls, config: LabelConfig) -> dict[str, Any]:
        """A file of candidates counts by its content."""
        given_steps(config.steps)
        return {**super().settings(config), "candidates": content_hash(config.candidates)}

    def label(self, trace: LabelTrace) -> LabelledTrace:
        """Replay every candidate at every checkpoint; a token's value is the mean over its single removals.

        The trace's tokens stay untested in `importance`: a threshold is the analyst's.
        """
        steps = self._steps(trace)
        rows: list[Mapping[str, Any]] = []
        width = self.execution.chunk_size
        cache = SlotCache(self.loaded.shape.num_layers, steps[-1] + max(width, 2 * self.config.horizon))
        for step in steps:
            self._extend(cache, trace, step)
            rows += self._rows(trace, cache, step)
        singles = [row for row in rows if len(row["blocks"]) == 1]
        spans = [(row["blocks"][0]["start"], row["blocks"][0]["stop"]) for row in singles]
        total = len(trace.token_ids)
        tokens = {
            "trace_id": trace.trace_id,
            "problem_id": trace.problem_id,
            "kind": self.name,
            "importance": token_importance(total, [], []),
            "value": token_mean(total, spans, [row["kl"] for row in singles]),
            "n_windows": len(rows),
            "status": "labelled",
        }
        return LabelledTrace(rows=rows, tokens=tokens)

    @classmethod
    def cost(cls, config: LabelConfig, execution: Execution, length: TraceLength) -> LabelCost:
        """One prefill, and per checkpoint the horizon once, and once per candidate in packs."""
        last = min(length.reasoning_stop, length.total - config.horizon)
        steps = checkpoints(length.reasoning_start, length.reasoning_stop, last, config)
        most = config.age_bands * config.per_band if config.candidates == STRATIFIED else length.total
        blocks = [
            min(-(-(step - length.reasoning_start) // config.block), most) + config.pairs for step in steps
        ]
        width = 1 if execution.literal else max(1, execution.chunk_size // config.horizon)
        packs = sum(-(-(count + 1) // width) for count in blocks)
        forwards = len(steps) * 2 + packs * (config.horizon if execution.literal else 1)
        tokens = (steps[-1] if steps else 0) + config.horizon * (sum(blocks) + 2 * len(steps))
        return LabelCost(sum(blocks), forwards, tokens)

    def _steps(self, trace: LabelTrace) -> list[int]:
        """The checkpoints of one trace."""
        last = min(trace.reasoning_stop, len(trace.token_ids) - self.config.horizon)
        steps = checkpoints(trace.reasoning_start, trace.reasoning_stop, last, self.config)
        if self.listed is not None:
            check_listed(trace, self.listed)
            own = {each.step for each in self.listed.get(trace.trace_id, ()) if each.step is not None}
            steps = sorted({*steps, *own})
            steps = [step for step in steps if removals(trace, step, self.config, self.listed)]
            if not steps:
                raise ItemError(
                    "no_candidate", f"{self.config.candidates} has no candidate that fits a checkpoint"
                )
            late = [step for step in steps if step > len(trace.token_ids) - self.config.horizon]
            if late:
                raise ItemError(
                    "bad_candidate",
                    f"step {late[0]} leaves no horizon of {self.config.horizon} tokens in a trace of "
                    f"{len(trace.token_ids)}",
                )
        if not steps:
            have = len(trace.token_ids) - trace.reasoning_start
            raise ItemError(
                "too_short",
                f"no checkpoint fits: the first takes {_first(self.config)} of reasoning and horizon = "
                f"{self.config.horizon} after them, and the trace has {have} from the start of its reasoning",
            )
        return steps

    def _extend(self, cache: SlotCache, trace: LabelTrace, step: int) -> None:
        for first in range(compat.cache_length(cache), step, self.execution.chunk_size):
            self._forward(
                cache, trace.token_ids[first : min(first + self.execution.chunk_size, step)], keep=1
            )

    @torch.inference_mode()
    def _forward(self, cache: SlotCache, tokens: Sequence[int], keep: int) -> Tensor:
        self.tally.forwards += 1
        self.tally.forwarded += len(tokens)
        ids = torch.tensor([list(tokens)], device=self.loaded.device)
        return compat.forward(self.loaded.model, ids, cache, logits_to_keep=keep)[0]

    def _rows(self, trace: LabelTrace, cache: SlotCache, step: int) -> Iterator[Mapping[str, Any]]:
        horizon = self.config.horizon
        tokens = trace.token_ids[step : step + horizon]
        reference = self._forward(cache, tokens, keep=horizon).log_softmax(dim=-1)
        cache.truncate(step)
        chosen = removals(trace, step, self.config, self.listed)
        damages = self._damages(cache, tokens, reference, [(), *chosen])
        null_kl = float(next(damages).mean())
        alone: dict[Removal, float] = {}
        for index, (removal, damage) in enumerate(zip(chosen, damages, strict=True)):
            kl = float(damage.mean())
            if len(removal) == 1:
                alone[removal] = kl
                synergy = None
            else:
                synergy = kl - sum(alone[block,] for block in removal)
            yield {
                "trace_id": trace.trace_id,
                "kind": self.name,
                "scope": self.scope.name,
                "step": step,
                "block_index": index,
                "blocks": [{"start": start, "stop": stop} for start, stop in removal],
                "kl": kl,
                "kl_by_offset": damage.tolist(),
                "null_kl": null_kl,
                "synergy": synergy,
            }

    def _damages(
        self, cache: SlotCache, tokens: Sequence[int], reference: Tensor, chosen: Sequence[Removal]
    ) -> Iterator[Tensor]:
        """KL by offset, [horizon], of each removal."""
        if self.execution.literal:
            for removal in chosen:
                yield divergence(reference, literal_logprobs(self.loaded, cache, tokens, removal, self.scope))
            return
        memory = budget(self.loaded, self.execution.memory_gib)
        queries = queries_at_once(self.loaded, compat.cache_length(cache), memory, self.execution.chunk_size)
        width = max(1, queries // len(tokens))
        for start in range(0, len(chosen), width):
            pack = chosen[start : start + width]
            without = packed_logprobs(self.loaded, cache, tokens, pack, self.scope, self.tally)
            for each in without:
                yield divergence(reference, each)


def given_steps(steps: str) -> list[int | None] | None:
    """The option `steps`: None for every; otherwise reasoning tokens, None among them for the boundary.

    Raises
    ------
    CfkvError
        For anything else.
    """
    if steps == "every":
        return None
    pieces = [piece.strip() for piece in steps.split(",")]
    for piece in pieces:
        if piece != BOUNDARY and not (piece.isdecimal() and int(piece) > 0):
            raise CfkvError(
                f"--steps {steps!r}: {piece!r} is no number of reasoning tokens; legal are every, or a list such as "
                f"64,200,{BOUNDARY}"
            )
    return [None if piece == BOUNDARY else int(piece) for piece in pieces]


def checkpoints(start: int, stop: int, last: int, config: LabelConfig) -> list[int]:
    """Steps within the reasoning [start, stop] that are not beyond `last`, ascending.

    They are start + every, start + 2 every, ..., or the given ones.
    """
    given = given_steps(config.steps)
    if given is None:
        return list(range(start + config.every, last + 1, config.every))
    wanted = {stop if count is None else start + count for count in given}
    return sorted(step for step in wanted if start < step <= min(last, stop))


def _first(config: LabelConfig) -> str:
    given = given_steps(config.steps)
    if given is None:
        return f"every = {config.every} tokens"
    return "the whole" if None in given else f"{min(count for count in given if count)} tokens"
