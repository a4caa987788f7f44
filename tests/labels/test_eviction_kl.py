"""Packed leave-one-out replay against cutting the rows out of the cache, and the table that it fills."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cfkv.answers import exact_match
from cfkv.config import Execution, LabelConfig
from cfkv.errors import ItemError
from cfkv.labels._base import LabelTrace
from cfkv.labels._packed import divergence, literal_logprobs, packed_logprobs
from cfkv.labels._scope import Scope
from cfkv.labels.eviction_kl import EvictionKL, checkpoints
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.slots import SlotCache
from cfkv.problems.registers import Registers, planted_truth

STEP, HORIZON = 30, 5
BLOCKS = [(0, 0), *((i, i + 1) for i in range(4, STEP, 3)), (5, 12), (0, STEP - 1)]


def everywhere(loaded: LoadedModel) -> Scope:
    return Scope.parse("all", "all", loaded.shape)


def prefilled(loaded: LoadedModel) -> tuple[SlotCache, list[int]]:
    """A cache of 30 random words, and the 5 that follow."""
    ids = torch.randint(9, 100, (STEP + HORIZON,), generator=torch.Generator().manual_seed(7)).tolist()
    cache = SlotCache(loaded.shape.num_layers, STEP)
    with torch.inference_mode():
        compat.forward(loaded.model, torch.tensor([ids[:STEP]]), cache)
    return cache, ids[STEP:]


def test_packed_is_deletion_from_the_cache(tiny: LoadedModel) -> None:
    """All families; single tokens, a block, and all entries but the last."""
    cache, tokens = prefilled(tiny)
    packed = packed_logprobs(tiny, cache, tokens, [[block] for block in BLOCKS], everywhere(tiny))
    literal = torch.stack(
        [literal_logprobs(tiny, cache, tokens, [block], everywhere(tiny)) for block in BLOCKS]
    )
    largest = float((packed - literal).abs().max())
    damage = [divergence(literal[0], found) for found in (packed, literal)]
    kl = float((damage[0] - damage[1]).abs().max())
    print(f"{tiny.name}: largest difference of log-probabilities {largest:.1e}, of KL {kl:.1e}")
    assert largest < 1e-4
    assert kl < 1e-5
    assert float(damage[1][-1].mean()) > 1e-3
    assert compat.cache_length(cache) == STEP


def test_the_replay_without_removal_is_the_model_itself(tiny: LoadedModel) -> None:
    """Against one plain forward of the whole sequence."""
    cache, tokens = prefilled(tiny)
    ids = torch.randint(9, 100, (STEP + HORIZON,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        plain = tiny.model(ids[None]).logits[0, STEP:].log_softmax(-1)
    for found in (
        literal_logprobs(tiny, cache, tokens, [], everywhere(tiny)),
        packed_logprobs(tiny, cache, tokens, [[]], everywhere(tiny))[0],
    ):
        torch.testing.assert_close(found, plain, atol=1e-4, rtol=0)


def test_divergence_by_hand() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4): 1/2 ln 2 + 1/2 ln(2/3) = 0.1438; of p with itself 0; the direction counts."""
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert float(divergence(p, q)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-6)
    assert float(divergence(q, p)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-6)
    assert float(divergence(p, p)) == 0


def solved(loaded: LoadedModel, seed: int) -> tuple[LabelTrace, list[str]]:
    """A registers problem with its reference solution as the trace, and the words of its reasoning."""
    problem = next(Registers().load(None, seed=seed))
    parts = [
        loaded.tokenizer(text)["input_ids"]
        for text in (problem.question, problem.solution, "</think>", f"\\boxed{{ {problem.answer} }}")
    ]
    prompt, reasoning, closing, answer = parts
    start = len(prompt) + len(reasoning) + len(closing)
    trace = LabelTrace(
        trace_id="t/0",
        problem_id="t",
        token_ids=tuple(sum(parts, [])),
        reasoning_start=len(prompt),
        reasoning_stop=len(prompt) + len(reasoning),
        answer_start=start,
        answer_stop=start + len(answer),
        answer_prefix="",
        answer=problem.answer,
    )
    return trace, str(problem.solution).split()


def label(
    loaded: LoadedModel, trace: LabelTrace, execution: Execution | None = None, **options: int
) -> EvictionKL:
    """The kind under a configuration."""
    config = LabelConfig(kind="eviction_kl", **options)  # type: ignore[arg-type]
    return EvictionKL(loaded, config, execution or Execution(), exact_match)


def test_width_chunks_and_the_literal_way_change_no_value(builtin: LoadedModel) -> None:
    """Row for row, to 1e-5 nats."""
    trace, _ = solved(builtin, 11)
    options = {"every": 70, "horizon": 4, "block": 3}
    ways = [
        Execution(),
        Execution(memory_gib=1e-6),
        Execution(chunk_size=16),
        Execution(literal=True),
    ]
    found = [label(builtin, trace, way, **options).label(trace).rows for way in ways]
    first = [(row["step"], row["block_index"], row["blocks"]) for row in found[0]]
    for rows in found[1:]:
        assert [(row["step"], row["block_index"], row["blocks"]) for row in rows] == first
        worst = max(abs(a["kl"] - b["kl"]) for a, b in zip(rows, found[0], strict=True))
        print(f"largest difference of KL {worst:.1e}")
        assert worst < 1e-5


def test_rows_and_token_values_by_hand(builtin: LoadedModel) -> None:
    """Blocks of 3 from the start of the reasoning, the last clipped at the step; a token's value is its mean."""
    trace, _ = solved(builtin, 12)
    start = trace.reasoning_start
    done = label(builtin, trace, every=40, horizon=4, block=3).label(trace)
    steps = sorted({row["step"] for row in done.rows})
    assert steps == list(range(start + 40, trace.reasoning_stop + 1, 40))
    first = [row for row in done.rows if row["step"] == steps[0]]
    assert len(first) == 14  # ceil(40 / 3)
    assert first[-1]["blocks"] == [{"start": start + 39, "stop": start + 40}]
    values = np.array(done.tokens["value"])
    over = [
        row["kl"] for row in done.rows if row["blocks"][0]["start"] <= start + 4 < row["blocks"][0]["stop"]
    ]
    assert len(over) == len(steps)
    assert values[start + 4] == pytest.approx(np.mean(over), rel=1e-5)
    assert np.isnan(values[:start]).all()
    assert np.isnan(values[steps[-1] :]).all()
    assert set(done.tokens["importance"]) == {-1}
    assert max(row["null_kl"] for row in done.rows) < 1e-6
    assert all(
        row["kl"] == pytest.approx(np.mean(row["kl_by_offset"]), rel=1e-5, abs=1e-7) for row in done.rows
    )


def test_the_answer_needs_the_fused_facts(builtin: LoadedModel) -> None:
    """At the boundary, before `</think>` and the answer: cached digits and fused facts hurt, filler does not."""
    trace, words = solved(builtin, 13)
    every = trace.reasoning_stop - trace.reasoning_start
    done = label(builtin, trace, every=every, horizon=6).label(trace)
    damage = np.array([row["kl"] for row in done.rows])
    truth = planted_truth(words)
    assert damage[truth.cache].mean() > 20 * damage[~truth.fact].mean()


def test_checkpoints_need_a_horizon(builtin: LoadedModel) -> None:
    """And a trace without one says what it would take."""
    trace, _ = solved(builtin, 11)
    total = len(trace.token_ids) - trace.reasoning_start
    assert checkpoints(trace.reasoning_start, trace.reasoning_stop, total - 8, LabelConfig(every=total)) == []
    with pytest.raises(ItemError, match=f"every = {total} tokens of reasoning and horizon = 8"):
        label(builtin, trace, every=total).label(trace)
