"""Knockout against deleting the rows from the cache, one token at a time; the null and truncation kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from cfkv.answers import exact_match
from cfkv.config import Execution, LabelConfig
from cfkv.labels._base import LabelTrace, label_kinds
from cfkv.labels._packed import Counterfactual
from cfkv.labels._replay import Replay
from cfkv.labels._scope import Scope
from cfkv.labels._windows import windows
from cfkv.labels.knockout import eviction_start
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.problems.registers import Registers, planted_truth

START, CAP = 40, 12
SPANS = [(0, 0), *windows(4, START, 8, 4)]


def replay(
    loaded: LoadedModel,
    context: Sequence[int],
    draft: Sequence[int],
    scope: Scope | None = None,
    **options: int,
) -> Replay:
    """A replay of answers inside an open box."""
    return Replay(
        loaded=loaded,
        context=tuple(context),
        answer=tuple(draft),
        prefix="\\boxed{",
        scope=scope or Scope.parse("all", "all", loaded.shape),
        **{"chunk_size": 512, "memory": 2**31, "max_new_tokens": CAP, **options},
    )


def hiding(context: Sequence[int], *spans: tuple[int, int]) -> list[Counterfactual]:
    """One row per span, hidden from token START on."""
    return [Counterfactual(START, tuple(context[START:]), (span,)) for span in spans]


def random_context(loaded: LoadedModel) -> list[int]:
    """40 random words and a short closing."""
    ids = torch.randint(9, 100, (START,), generator=torch.Generator().manual_seed(3)).tolist()
    return [*ids, *loaded.tokenizer.encode("</think> \\boxed{")]


@torch.inference_mode()
def by_deletion(
    loaded: LoadedModel, context: Sequence[int], span: tuple[int, int], draft: Sequence[int]
) -> float:
    """Mean NLL of the draft when the span's rows are cut out of the cache and all positions are kept."""
    cache = compat.new_cache()
    ids = torch.tensor([list(context)])
    compat.forward(loaded.model, ids[:, :START], cache)
    kept = torch.tensor([i for i in range(START) if not span[0] <= i < span[1]])
    cache, keys = compat.map_cache(cache, slots=kept), kept
    nll, logits = 0.0, None
    for position, token in enumerate([*context[START:], *draft], START):
        if logits is not None and position >= len(context):
            nll -= float(logits.log_softmax(-1)[token])
        query = torch.tensor([position])
        keys = torch.cat([keys, query])
        mask = compat.masks_from_positions(loaded.model, query, keys)
        step = torch.tensor([[token]])
        logits = compat.forward(loaded.model, step, cache, positions=query[None], attention_mask=mask)[0, -1]
    return nll / len(draft)


def test_knockout_is_deletion_from_the_cache(tiny: LoadedModel) -> None:
    """All families, sliding layers among them: the probability of the draft after either is the same."""
    context, draft = random_context(tiny), [20, 9, 31, 8]
    found = replay(tiny, context, draft).fast(hiding(context, *SPANS), draft)
    expected = [by_deletion(tiny, context, span, draft) for span in SPANS]
    largest = max(abs(mine.nll - theirs) for mine, theirs in zip(found, expected, strict=True))
    print(f"{tiny.name}: largest difference of nll {largest:.1e}")
    assert largest < 1e-5
    # The windows do something, on sliding layers only those within reach.
    assert sum(abs(result.nll - found[0].nll) > 1e-4 for result in found[1:]) >= 2


def test_fast_knockout_is_the_literal_one(tiny: LoadedModel) -> None:
    """Same tokens, drafts accepted or not, for batches and chunks of any size."""
    context = random_context(tiny)
    rows = hiding(context, *SPANS)
    draft = replay(tiny, context, [20]).literal(rows[0]).token_ids
    literal = [replay(tiny, context, draft).literal(row) for row in rows]
    for sizes in ({"memory": 1}, {"chunk_size": 1}, {"chunk_size": 7}):
        found = replay(tiny, context, draft, **sizes).fast(rows, draft)
        assert [r.token_ids for r in found] == [r.token_ids for r in literal]
        assert [r.accepted_draft for r in found] == [r.accepted_draft for r in literal]
        assert max(abs(a.nll - b.nll) for a, b in zip(found, literal, strict=True)) < 1e-5
    assert literal[0].accepted_draft == len(draft)


def test_an_empty_window_changes_nothing_bit_for_bit(tiny: LoadedModel) -> None:
    """Hiding nothing gives the very numbers of the replay that has no mask."""
    context, draft = random_context(tiny), [20, 9, 31, 8]
    masked = replay(tiny, context, draft).fast(hiding(context, (0, 0), (7, 7)), draft)
    plain = replay(tiny, context, draft).fast([Counterfactual(START, tuple(context[START:]))] * 2, draft)
    assert [(r.nll, r.min_margin, r.token_ids) for r in masked] == [
        (r.nll, r.min_margin, r.token_ids) for r in plain
    ]


def solved(loaded: LoadedModel, seed: int) -> tuple[LabelTrace, list[str]]:
    """A registers problem with its reference solution as the trace, and the words of its reasoning."""
    problem = next(Registers().load(None, seed=seed))
    encode = lambda text: loaded.tokenizer(text)["input_ids"]  # noqa: E731
    prompt, reasoning = encode(problem.question), encode(problem.solution)
    answer = encode(f"\\boxed{{ {problem.answer} }}")
    start = len(prompt) + len(reasoning) + 1
    trace = LabelTrace(
        trace_id="t/0",
        problem_id="t",
        token_ids=(*prompt, *reasoning, *encode("</think>"), *answer),
        reasoning_start=len(prompt),
        reasoning_stop=start - 1,
        answer_start=start,
        answer_stop=start + len(answer),
        answer_prefix="",
        answer=problem.answer,
    )
    return trace, str(problem.solution).split()


def rows(loaded: LoadedModel, kind: str, trace: LabelTrace) -> list[dict[str, object]]:
    """The windows of one kind, 8 tokens with stride 4."""
    config = LabelConfig(kind=kind, window=8, stride=4, max_new_tokens=16)
    return [
        dict(row) for row in label_kinds.get(kind)(loaded, config, Execution(), exact_match).label(trace).rows
    ]


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_knockout_flips_where_the_cached_facts_are(builtin: LoadedModel, seed: int) -> None:
    """The built-in model reads digit and fused fact from the cache: windows over neither leave the answer."""
    trace, words = solved(builtin, seed)
    truth = planted_truth(words)
    for row in rows(builtin, "knockout", trace):
        span = slice(row["start"] - trace.reasoning_start, row["stop"] - trace.reasoning_start)  # type: ignore[operator]
        if truth.fused[span].any():
            assert row["flipped"]
        if not truth.fact[span].any():
            assert not row["flipped"]


def test_the_null_kind_is_a_noise_floor(builtin: LoadedModel) -> None:
    """Nothing flips, and nothing moves beyond rounding."""
    found = rows(builtin, "null", solved(builtin, 11)[0])
    assert not any(row["flipped"] for row in found)
    assert max(abs(row["delta_nll"]) for row in found) < 1e-4  # type: ignore[arg-type]


def test_truncation_regenerates_from_what_precedes_the_window(builtin: LoadedModel) -> None:
    """Against the literal replay of the cut context; the first cut removes all reasoning, and flips."""
    trace, _ = solved(builtin, 11)
    found = rows(builtin, "truncation", trace)
    plain = dataclasses.replace(
        replay(builtin, trace.context, trace.answer_ids, max_new_tokens=16), prefix=""
    )
    control = plain.literal(Counterfactual(0, trace.context))
    for row in found[::9]:
        cut = (*trace.context[: row["start"]], *trace.context[trace.reasoning_stop :])  # type: ignore[misc]
        expected = plain.literal(Counterfactual(0, cut))
        assert row["answer"] == expected.answer
        assert row["delta_nll"] == pytest.approx(expected.nll - control.nll, abs=1e-4)
    assert found[0]["flipped"]


def test_eviction_starts_where_the_reasoning_ends(builtin: LoadedModel) -> None:
    """Or, where the answer follows at once, at the last token of the context, whose logits decide its first token."""
    trace, _ = solved(builtin, 11)
    assert eviction_start(trace) == trace.reasoning_stop == trace.answer_start - 1
    fields = {name: getattr(trace, name) for name in LabelTrace.__dataclass_fields__}
    bare = LabelTrace(**{**fields, "answer_start": trace.reasoning_stop})
    assert eviction_start(bare) == trace.reasoning_stop - 1
