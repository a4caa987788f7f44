"""Decoding under a budget: against position, against no policy, against caches that are copied, and in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfkv.bench._base import Bench, Measured, benches, timed
from cfkv.config import BenchConfig
from cfkv.evaluation._loop import decode
from cfkv.evaluation._reading import Reading
from cfkv.evaluation._row import Task
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import Policy, Protection, View, make_policy
from cfkv.policies._budget import Budget, victim
from cfkv.signals._cost import random_ids

PLAIN = "full"
FROZEN = ("streaming_llm", "random", "knorm", "epikv")
READING = ("h2o", "tova")
COPIED = "streaming_llm"
ARMS = (
    "streaming_llm",
    "random",
    "knorm",
    "h2o",
    "tova",
    "epikv",
    "keydiff:every=16",
    "snapkv_decode:every=16",
)
ROUNDS = 3


@benches.register
class Decode(Bench):
    """What does decoding under a budget cost, and what do fixed slots, batches and shared prompts save?"""

    model: ClassVar[str] = "smollm2"

    def run(self, loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
        """Sizes follow `slots` (1,024 unless told otherwise), `steps` and `sequences`."""
        with torch.inference_mode():
            return [
                *against_position(loaded, config),
                *against_no_policy(loaded, config),
                *against_copies(loaded, config, config.slots, (0.95, 0.95)),
                *against_copies(loaded, config, 4 * config.slots, (1.25, 1.5)),
                *in_batches(loaded, config),
                *in_arms(loaded, config),
            ]


def step_seconds(task: Task) -> list[float]:
    """Seconds between the steps of a decode, its policy's work included; the first step is left out."""
    times: list[float] = []
    decode([task], 1, watch=lambda index, step, logits: times.append(time.perf_counter()))
    return [later - sooner for sooner, later in zip(times[:-1], times[1:], strict=True)]


def interleaved(calls: Mapping[str, Callable[[], list[float]]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of each call's steps; the calls take turns, so that a busy machine hurts all alike."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = call()
            if turn:  # the first turn warms up
                found[name] += seconds
    return {name: median(seconds) for name, seconds in found.items()}


def never(ids: list[int]) -> str | None:
    """A stop rule: go on to the cap."""
    return None


def parsed(text: str) -> Policy:
    """A policy from its text."""
    from cfkv.evaluation._names import parse_policy

    return make_policy(*parse_policy(text))


def read(loaded: LoadedModel, policies: Sequence[Policy], ids: Sequence[int], config: BenchConfig) -> Reading:
    """A prompt of which all but the first token may be evicted."""
    reading = Reading(loaded, policies, ids, prompt_len=1, chunk_size=config.chunk_size)
    reading.read_to(len(ids))
    return reading


def generation(reading: Reading, index: int, slots: int | None, steps: int) -> Task:
    """`steps` tokens written after a reading."""
    budget = None if slots is None else Budget(slots=slots)
    return Task(reading=reading, index=index, budget=budget, max_new_tokens=steps + 1, stop=never)


def against_position(loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
    """Steps at the beginning and at the end of a long text, with the tokens between them read at once."""
    early, late = config.slots // 2, config.positions - config.steps
    ids = random_ids(loaded, late)
    policies = [make_policy(COPIED), make_policy(PLAIN)]
    readings = {stop: read(loaded, policies, ids[:stop], config) for stop in (early, late)}
    calls = {
        f"{name} {stop}": lambda index=index, slots=slots, stop=stop: step_seconds(
            generation(readings[stop], index, slots, config.steps)
        )
        for index, (name, slots) in enumerate(((COPIED, early), (PLAIN, None)))
        for stop in (early, late)
    }
    seconds = interleaved(calls)
    where = f"steps at {late:,} / at {early:,}"
    return [
        Measured(
            f"{early:,} slots: seconds of {where}",
            seconds[f"{COPIED} {late}"] / seconds[f"{COPIED} {early}"],
            "ratio",
            1.15,
            "lower",
        ),
        Measured(
            f"plain decoding: seconds of {where}",
            seconds[f"{PLAIN} {late}"] / seconds[f"{PLAIN} {early}"],
            "ratio",
        ),
    ]


def against_no_policy(loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
    """The same loop over as many slots, with and without a policy that evicts at every step."""
    ids = random_ids(loaded, config.slots)
    policies = [make_policy(name) for name in (PLAIN, *FROZEN, *READING)]
    reading = read(loaded, policies, ids, config)
    calls = {
        policy.name: lambda index=index, slots=slots: step_seconds(
            generation(reading, index, slots, config.steps)
        )
        for index, policy in enumerate(policies)
        for slots in [None if policy.name == PLAIN else config.slots]
    }
    seconds = interleaved(calls)
    plain = seconds.pop(PLAIN)
    rows = [Measured(f"{config.slots:,} slots, no policy", 1e3 * plain, "ms/token")]
    for name, value in seconds.items():
        goal = 0.1 if name in FROZEN else 0.35
        rows.append(Measured(f"{name}: added / no policy", value / plain - 1, "share", goal, "lower"))
    return rows


def against_copies(
    loaded: LoadedModel, config: BenchConfig, slots: int, goals: tuple[float, float]
) -> list[Measured]:
    """Fixed slots against the same policy on a cache that is concatenated and gathered, or rebuilt, each step."""
    ids = random_ids(loaded, slots)
    policy = make_policy(COPIED)
    reading = read(loaded, [policy], ids, config)
    written: dict[str, list[int]] = {}

    def fixed() -> list[float]:
        times: list[float] = []
        (outcome,) = decode(
            [generation(reading, 0, slots, config.steps)],
            1,
            watch=lambda index, step, logits: times.append(time.perf_counter()),
        )
        written["fixed"] = outcome.token_ids
        return [later - sooner for sooner, later in zip(times[:-1], times[1:], strict=True)]

    def copied(name: str, shrink: Callable[[Any, Tensor], Any]) -> list[float]:
        times, written[name] = copying_loop(loaded, reading, policy, slots, config.steps, shrink)
        return times

    seconds = interleaved(
        {
            "fixed": fixed,
            "gathered": lambda: copied("gathered", gather),
            "rebuilt": lambda: copied("rebuilt", rebuild),
        }
    )
    same = float(written["fixed"] == written["gathered"] == written["rebuilt"])
    return [
        Measured(f"{slots:,} slots", 1e3 * seconds["fixed"], "ms/token"),
        Measured(
            f"{slots:,} slots: concatenated and gathered / fixed",
            seconds["gathered"] / seconds["fixed"],
            "x",
            goals[0],
            "higher",
        ),
        Measured(
            f"{slots:,} slots: rebuilt / fixed",
            seconds["rebuilt"] / seconds["fixed"],
            "x",
            goals[1],
            "higher",
        ),
        Measured(f"{slots:,} slots: same tokens", same, "share", 1.0, "higher"),
    ]


def gather(cache: Any, kept: Tensor) -> Any:
    """Cut a transformers cache to the slots `kept`, layer by layer."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.index_select(2, kept), layer.values.index_select(2, kept)
    return cache


def rebuild(cache: Any, kept: Tensor) -> Any:
    """A new transformers cache of the slots `kept`."""
    return compat.map_cache(cache, slots=kept)


def copying_loop(
    loaded: LoadedModel,
    reading: Reading,
    policy: Policy,
    slots: int,
    steps: int,
    shrink: Callable[[Any, Tensor], Any],
) -> tuple[list[float], list[int]]:
    """Decode greedily on transformers' own cache, which concatenates, and cut it by `shrink` after each token.

    Returns the seconds between steps and the tokens. The policy is the same code as in the fixed slots.
    """
    cache = compat.new_cache()
    for layer in range(loaded.shape.num_layers):
        cache.update(reading.keys[layer][None].clone(), reading.values[layer][None].clone(), layer)
    positions = torch.arange(reading.length, device=loaded.device)
    token, step = int(reading.logits.argmax()), reading.length
    tokens, times = [token], []
    for _ in range(steps):
        logits = compat.forward(
            loaded.model,
            torch.tensor([[token]], device=loaded.device),
            cache,
            positions=torch.tensor([[step]], device=loaded.device),
            logits_to_keep=1,
        )
        times.append(time.perf_counter())
        positions = torch.cat([positions, positions.new_tensor([step])])
        step += 1
        if len(positions) > slots:
            view = _view(policy, positions[None, None], slots, step)
            gone = int(victim(policy.score(view), view.positions, view.valid, view.protected))
            kept = torch.cat([torch.arange(gone), torch.arange(gone + 1, len(positions))]).to(loaded.device)
            cache, positions = shrink(cache, kept), positions[kept]
        token = int(logits[0, -1].argmax())
        tokens.append(token)
    return [later - sooner for sooner, later in zip(times[:-1], times[1:], strict=True)], tokens


def _view(policy: Policy, positions: Tensor, slots: int, step: int) -> View:
    valid = torch.ones_like(positions, dtype=torch.bool)
    protection: Protection = policy.protection(slots, 1, step)
    return View(
        step=step,
        prompt_len=1,
        positions=positions,
        valid=valid,
        protected=protection.mask(positions, valid, 1, step),
    )


def in_batches(loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
    """Several sequences at one budget, together and one after the other."""
    slots, count = config.slots // 4, config.sequences
    policy = make_policy(COPIED)
    readings = [read(loaded, [policy], random_ids(loaded, slots, seed=seed), config) for seed in range(count)]
    tasks = [generation(reading, 0, slots, config.steps) for reading in readings]
    found: dict[str, list[list[int]]] = {}

    def decoded(name: str, batch_size: int) -> list[float]:
        outcomes, seconds = timed(lambda: decode(tasks, batch_size), loaded.device)
        found[name] = [outcome.token_ids for outcome in outcomes]
        return [seconds]

    seconds = interleaved({"one": lambda: decoded("one", 1), "all": lambda: decoded("all", count)}, rounds=2)
    same = sum(a == b for a, b in zip(found["one"], found["all"], strict=True)) / count
    return [
        Measured(
            f"{count} sequences of {slots:,} slots: tokens/s together / one by one",
            seconds["one"] / seconds["all"],
            "x",
            2.5,
            "higher",
        ),
        Measured(f"{count} sequences: same answers", same, "share", 1.0, "higher"),
    ]


def in_arms(loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
    """Policies at two budgets: one prompt and one batch, or a prompt and a run each."""
    ids = random_ids(loaded, config.slots // 2)
    policies = [parsed(text) for text in ARMS]
    budgets = (config.slots // 8, config.slots // 4)
    arms = [(index, slots) for index in range(len(policies)) for slots in budgets]
    found: dict[str, list[list[int]]] = {}

    def together() -> list[float]:
        def work() -> list[list[int]]:
            reading = read(loaded, policies, ids, config)
            tasks = [generation(reading, index, slots, config.steps) for index, slots in arms]
            return [outcome.token_ids for outcome in decode(tasks, len(tasks))]

        found["together"], seconds = timed(work, loaded.device)
        return [seconds]

    def apart() -> list[float]:
        def work() -> list[list[int]]:
            runs = []
            for index, slots in arms:
                reading = read(loaded, [policies[index]], ids, config)
                runs += decode([generation(reading, 0, slots, config.steps)], 1)
            return [outcome.token_ids for outcome in runs]

        found["apart"], seconds = timed(work, loaded.device)
        return [seconds]

    seconds = interleaved({"together": together, "apart": apart}, rounds=1)
    same = sum(a == b for a, b in zip(found["together"], found["apart"], strict=True)) / len(arms)
    return [
        Measured(
            f"{len(arms)} arms of a prompt of {len(ids):,}: one by one / together",
            seconds["apart"] / seconds["together"],
            "x",
            4.0,
            "higher",
        ),
        Measured(f"{len(arms)} arms: same answers", same, "share", 1.0, "higher"),
    ]
