"""Occlusion labels: the fast replay against the literal protocol, with short answers and with long ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import ClassVar

import torch

from cfkv.bench._base import Bench, Measured, benches, timed
from cfkv.bench._texts import worked_items
from cfkv.config import BenchConfig, TraceConfig
from cfkv.errors import CfkvError
from cfkv.labels._memory import budget
from cfkv.labels._packed import Counterfactual
from cfkv.labels._replay import Replay, Replayed
from cfkv.labels._scope import Scope
from cfkv.labels._windows import windows
from cfkv.margins import margin_text, narrow_margin
from cfkv.models import compat
from cfkv.models.decode import Generation, StopRule, generate_greedy
from cfkv.models.loading import LoadedModel
from cfkv.models.stopping import answer_stop
from cfkv.models.tokens import replacement_id
from cfkv.traces.items import TraceItem, trace_items
from cfkv.traces.prompts import WORKED_ANSWER_PREFIX, prompt_ids, worked_pieces

SHORT_CAP, LONG_PREFIX, LONG_LEAST = 32, "Here is the solution again:\n", 100
LEAST_REASONING = 40  # as in the GSM8K recipe: shorter ones have a handful of windows
# A literal replay of a long answer takes seconds; every fifth window stands for its neighbours.
LONG_EVERY = 5


@dataclass(frozen=True)
class Case:
    """One trace to label: its context, the answer that the model gives, and a window's counterfactuals."""

    context: tuple[int, ...]
    answer: tuple[int, ...]
    prefix: str
    cap: int
    rows: list[Counterfactual]


@dataclass
class Totals:
    """Sums over the traces of one case."""

    fast: float = 0.0
    fast_accepted: float = 0.0
    fast_null: float = 0.0
    literal: list[float] = field(default_factory=list)
    literal_accepted: list[float] = field(default_factory=list)
    replays: int = 0
    accepted: int = 0
    forwarded: int = 0
    needed: int = 0
    checked: int = 0
    same: int = 0
    excused: int = 0


@benches.register
class Labels(Bench):
    """How much faster are occlusion labels than one regeneration per window?"""

    model: ClassVar[str] = "smollm2"

    def run(self, loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
        """Short answers end with the box that the context opens; long ones write the solution again first."""
        rows = self._case(
            "short answers", loaded, config, WORKED_ANSWER_PREFIX, SHORT_CAP, least=1, goals=(3, None)
        )
        least = min(LONG_LEAST, config.answer_tokens)
        return rows + self._case(
            "long answers", loaded, config, LONG_PREFIX, config.answer_tokens, least=least, goals=(4, 8)
        )

    def _case(
        self,
        name: str,
        loaded: LoadedModel,
        config: BenchConfig,
        prefix: str,
        cap: int,
        *,
        least: int,
        goals: tuple[float, float | None],
    ) -> list[Measured]:
        cases = find_cases(loaded, config, prefix, cap, least)
        if not cases:
            raise CfkvError(
                f"bench labels: {loaded.name} writes no answer of {least} tokens after any of the problems; "
                "lower --answer-tokens or use another model"
            )
        totals = Totals()
        warm = cases[0]
        replay_of(loaded, warm, config).fast(warm.rows[:4], warm.answer)
        for case in cases:
            measure(loaded, case, config, totals, every=1 if least == 1 else LONG_EVERY)
        fast, literal = totals.fast / totals.replays, fmean(totals.literal)
        bound = totals.needed / totals.replays / plain_speed(loaded, cases[0], config)
        found = [
            Measured(f"{name}: times literal", literal / fast, "x", goals[0], "higher"),
            Measured(f"{name}: fast", fast, "s/window"),
            Measured(f"{name}: literal", literal, "s/window"),
            Measured(f"{name}: lower bound, needed tokens at the plain speed", bound, "s/window"),
            Measured(f"{name}: accepted drafts", totals.accepted / totals.replays, "share"),
            Measured(
                f"{name}: tokens per answer", sum(len(case.answer) for case in cases) / len(cases), "tokens"
            ),
            Measured(f"{name}: traces", len(cases), "traces"),
            Measured(f"{name}: replays", totals.replays, "windows and controls"),
            Measured(f"{name}: forwarded", totals.forwarded, "tokens"),
            Measured(f"{name}: forwarded / needed", totals.forwarded / totals.needed, "ratio", 1.1, "lower"),
            Measured(f"{name}: same tokens as literal", totals.same / totals.checked, "share", 1, "higher"),
            Measured(
                f"{name}: excused by a margin below {margin_text(str(loaded.dtype))}",
                totals.excused,
                "windows",
            ),
        ]
        # The control is always accepted, and always has its literal twin.
        accepted = fmean(totals.literal_accepted)
        found[1:1] = [
            Measured(
                f"{name}: times literal, accepted windows",
                accepted / (totals.fast_accepted / totals.accepted),
                "x",
                goals[1],
                "higher" if goals[1] else None,
            ),
            Measured(
                f"{name}: times literal, null windows (all accepted)",
                accepted / (totals.fast_null / totals.replays),
                "x",
            ),
        ]
        return found


def find_cases(loaded: LoadedModel, config: BenchConfig, prefix: str, cap: int, least: int) -> list[Case]:
    """The first problems that are long enough, and whose answer by the model has at least `least` tokens."""
    trace_config = TraceConfig(dataset="gsm8k", path=config.path, mode="worked_solution")
    items: Sequence[TraceItem] = worked_items() if config.path is None else trace_items(trace_config)
    filler = replacement_id(loaded.tokenizer, loaded.model, "auto")
    found: list[Case] = []
    for item in items:
        prompt = prompt_ids(loaded.tokenizer, item, trace_config)
        opening, solution, closing = worked_pieces(loaded.tokenizer, prompt, item, prefix)
        if len(solution) < LEAST_REASONING:
            continue
        start = len(prompt) + len(opening)
        context = (*prompt, *opening, *solution, *closing)
        written = regenerate(loaded, context, cap, answer_stop(loaded, prefix), config.chunk_size)
        if len(written.token_ids) < least:
            continue
        spans = windows(start, start + len(solution), config.window, max(1, config.window // 2))
        rows = [Counterfactual(first, (*[filler] * (stop - first), *context[stop:])) for first, stop in spans]
        control = Counterfactual(len(context) - 1, context[-1:])
        found.append(Case(context, tuple(written.token_ids), prefix, cap, [control, *rows]))
        if len(found) == config.traces:
            break
    return found


def plain_speed(loaded: LoadedModel, case: Case, config: BenchConfig) -> float:
    """Tokens per second of a plain chunked forward, the best of three; as long as the model's positions allow."""
    length = min(config.chunk_size, loaded.shape.max_positions)
    ids = torch.tensor([(case.context * (length // len(case.context) + 1))[:length]], device=loaded.device)

    def forward() -> None:
        with torch.inference_mode():
            compat.forward(loaded.model, ids, compat.new_cache(), logits_to_keep=1)

    return length / min(timed(forward, loaded.device)[1] for _ in range(3))


def regenerate(
    loaded: LoadedModel, context: Sequence[int], cap: int, stop: StopRule, chunk_size: int
) -> Generation:
    """The literal protocol: batch 1, a full prefill, token by token, the same stop rule."""
    return generate_greedy(loaded, [context], max_new_tokens=[cap], stops=[stop], chunk_size=chunk_size)[0]


def replay_of(loaded: LoadedModel, case: Case, config: BenchConfig) -> Replay:
    """A fresh engine, as a label kind makes it for each trace."""
    return Replay(
        loaded=loaded,
        context=case.context,
        answer=case.answer,
        prefix=case.prefix,
        max_new_tokens=case.cap,
        chunk_size=config.chunk_size,
        memory=budget(loaded, None),
        scope=Scope.parse("all", "all", loaded.shape),
    )


def measure(loaded: LoadedModel, case: Case, config: BenchConfig, totals: Totals, every: int) -> None:
    """Fast on all rows, literal on every `every`-th; the control is a row like the windows."""
    replay = replay_of(loaded, case, config)

    def fast() -> list[Replayed]:
        return replay.fast(case.rows[:1], case.answer) + replay.fast(case.rows[1:], case.answer)

    found, took = timed(fast, loaded.device)
    totals.fast += took
    totals.replays += len(found)
    totals.forwarded += replay.tally.forwarded
    # The context once, each window's own tokens, the answer but its last token, and what had to be decoded.
    totals.needed += len(case.context) - 1 + sum(len(row.tokens) + len(case.answer) - 1 for row in case.rows)
    totals.needed += sum(row.decoded for row in found)
    accepted = [index for index, row in enumerate(found) if row.token_ids == case.answer]
    totals.accepted += len(accepted)
    chosen = [case.rows[index] for index in accepted]
    again = replay_of(loaded, case, config)
    totals.fast_accepted += timed(partial(again.fast, chosen, case.answer), loaded.device)[1]
    null = [Counterfactual(row.keep, case.context[row.keep :]) for row in case.rows]
    unchanged = replay_of(loaded, case, config)
    totals.fast_null += timed(partial(unchanged.fast, null, case.answer), loaded.device)[1]
    for index in range(0, len(case.rows), every):
        row = case.rows[index]
        context = [*case.context[: row.keep], *row.tokens]
        stop = answer_stop(loaded, case.prefix)
        literal, took = timed(
            partial(regenerate, loaded, context, case.cap, stop, config.chunk_size), loaded.device
        )
        totals.literal.append(took)
        if index in accepted:
            totals.literal_accepted.append(took)
        compare(found[index], literal, totals, narrow_margin(str(loaded.dtype)))


def compare(fast: Replayed, literal: Generation, totals: Totals, margin: float) -> None:
    """Whether both ways wrote the same tokens; a narrow margin excuses a difference, and is counted."""
    same = list(fast.token_ids) == literal.token_ids
    tiny = min(fast.min_margin, literal.min_margin) < margin
    totals.checked += 1
    totals.same += same or tiny
    totals.excused += tiny and not same
