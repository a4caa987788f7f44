"""Greedy decoding and teacher forcing, held against loops that recompute the whole sequence every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from cfkv.models import compat
from cfkv.models.decode import Generation, StopRule, generate_greedy, teacher_forced_logprobs
from cfkv.models.loading import LoadedModel
from cfkv.models.stopping import answer_stop, trace_stop

MARGIN = 1e-4
LENGTHS = (5, 17, 1, 12, 30, 17)
NEW = (20, 6, 15, 1, 20, 9)


def never(ids: list[int]) -> str | None:
    return None


def on_token(token: int) -> StopRule:
    return lambda ids: "stop" if ids[-1] == token else None


def prompts(loaded: LoadedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(9, loaded.shape.vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]


def literal(loaded: LoadedModel, prompt: Sequence[int], cap: int, stop: StopRule) -> Generation:
    """The obvious loop: no cache, no batch, no position argument, float64 log-probabilities."""
    result = Generation()
    while True:
        logits = loaded.model(torch.tensor([[*prompt, *result.token_ids]])).logits[0, -1].double()
        best = int(logits.argmax())
        ordered = logits.sort(descending=True).values
        result.token_ids.append(best)
        result.logprobs.append(float(logits.log_softmax(-1)[best]))
        result.min_margin = min(result.min_margin, float(ordered[0] - ordered[1]))
        reason = stop(result.token_ids)
        if reason is not None:
            result.finish_reason = reason
            return result
        if len(result.token_ids) == cap:
            return result


def compare(found: Generation, expected: Generation, excused: list[float]) -> float:
    """Largest difference of log-probabilities and margins; tokens may differ only where the margin is tiny."""
    if found.token_ids != expected.token_ids:
        assert min(found.min_margin, expected.min_margin) < MARGIN
        excused.append(expected.min_margin)
        return 0.0
    assert found.finish_reason == expected.finish_reason
    gaps = [abs(a - b) for a, b in zip(found.logprobs, expected.logprobs, strict=True)]
    return max([*gaps, abs(found.min_margin - expected.min_margin)])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_batch_is_batch_one_is_the_obvious_loop(
    make_tiny: Callable[..., LoadedModel], tiny: LoadedModel, attention: str
) -> None:
    loaded = make_tiny(tiny.name.removeprefix("tiny-"), attention)
    given, stop = prompts(loaded), on_token(9 + 6)
    expected = [literal(loaded, prompt, cap, stop) for prompt, cap in zip(given, NEW, strict=True)]
    assert len({len(generation.token_ids) for generation in expected}) > 2  # rows leave at different times
    excused: list[float] = []
    largest = 0.0
    for chunk in (512, 4, 1) if attention == "sdpa" else (512,):
        batch = generate_greedy(
            loaded, given, max_new_tokens=NEW, stops=[stop] * len(given), chunk_size=chunk
        )
        alone = [
            generate_greedy(loaded, [prompt], max_new_tokens=[cap], stops=[stop], chunk_size=chunk)[0]
            for prompt, cap in zip(given, NEW, strict=True)
        ]
        for row in range(len(given)):
            largest = max(largest, compare(batch[row], expected[row], excused))
            largest = max(largest, compare(alone[row], expected[row], excused))
    print(f"{tiny.name} {attention}: largest {largest:.2e}, {len(excused)} excused by margin")
    assert largest < 1e-4
    assert not excused


def test_builtin_writes_what_the_obvious_loop_writes(builtin: LoadedModel) -> None:
    from cfkv.problems.registers import Registers

    problems = Registers().load(None, seed=3)
    given = [builtin.tokenizer(next(problems).question)["input_ids"] for _ in range(3)]
    stops = [trace_stop(builtin) for _ in given]
    batch = generate_greedy(builtin, given, max_new_tokens=[300] * 3, stops=stops, chunk_size=512)
    assert {generation.finish_reason for generation in batch} <= {"boxed", "stop"}
    expected = literal(builtin, given[0], 300, stops[0])
    largest = compare(batch[0], expected, [])
    print(f"builtin: {len(expected.token_ids)} tokens, largest {largest:.2e}")
    assert batch[0].token_ids == expected.token_ids
    assert largest < 1e-4


def test_caps_per_row(llama: LoadedModel) -> None:
    found = generate_greedy(
        llama, prompts(llama), max_new_tokens=NEW, stops=[never] * len(NEW), chunk_size=512
    )
    assert [len(generation.token_ids) for generation in found] == list(NEW)
    assert {generation.finish_reason for generation in found} == {"length"}
    assert all(len(generation.logprobs) == cap for generation, cap in zip(found, NEW, strict=True))


def test_end_token_is_kept_and_ends(llama: LoadedModel) -> None:
    prompt = prompts(llama)[0]
    free = literal(llama, prompt, 20, never)
    third = free.token_ids[3]
    cut = free.token_ids.index(third) + 1
    found = generate_greedy(llama, [prompt], max_new_tokens=[20], stops=[on_token(third)], chunk_size=512)[0]
    assert found.token_ids == free.token_ids[:cut]
    assert found.finish_reason == "stop"


def ids_of(loaded: LoadedModel, text: str) -> list[int]:
    return list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("prefix", "text", "first"),
    [
        ("", r"w1 \boxed{ 3 } w2", (4, "boxed")),
        ("", r"} w1 \boxed{ 3 w2 } w3", (6, "boxed")),
        ("", r"\boxed{ 3 <eos> } w3", (3, "stop")),
        (r"The final answer is \boxed{", "3 w1 } w2", (3, "boxed")),
        (r"The final answer is \boxed{", "3 w1 w2", None),
        ("", "3 } w1 }", None),
    ],
)
def test_answer_stop(llama: LoadedModel, prefix: str, text: str, first: tuple[int, str] | None) -> None:
    ids = ids_of(llama, text)
    rule = answer_stop(llama, prefix)
    told = [(n, reason) for n in range(1, len(ids) + 1) if (reason := rule(ids[:n])) is not None]
    assert (told[0] if told else None) == first


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (r"\boxed{ 1 } w1 </think> \boxed{ 3 } w2", (8, "boxed")),
        (r"\boxed{ 1 } w1 w2", None),
        (r"</think> \boxed{ 1 </think> 2 } \boxed{ 3 }", (9, "boxed")),
        (r"w1 <eos> </think>", (2, "stop")),
        (r"</think> w1 } w2", None),
    ],
)
def test_trace_stop(llama: LoadedModel, text: str, first: tuple[int, str] | None) -> None:
    ids = ids_of(llama, text)
    rule = trace_stop(llama)
    told = [(n, reason) for n in range(1, len(ids) + 1) if (reason := rule(ids[:n])) is not None]
    assert (told[0] if told else None) == first


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_teacher_forcing_is_log_softmax_of_the_plain_forward(tiny: LoadedModel, chunk: int) -> None:
    ids = prompts(tiny)[4]
    plain = tiny.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    largest = 0.0
    for start in (1, 2, 3, 4, 11, len(ids) - 1, len(ids)):
        found = teacher_forced_logprobs(tiny, ids, start, chunk_size=chunk)
        expected = [float(plain[place - 1, ids[place]]) for place in range(start, len(ids))]
        assert len(found) == len(expected)
        largest = max([largest, *(abs(a - b) for a, b in zip(found, expected, strict=True))])
    print(f"{tiny.name} chunks of {chunk}: {largest:.2e}")
    assert largest < 1e-5


def test_teacher_forcing_holds_logits_of_one_chunk(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[int] = []
    plain = compat.forward

    def watched(*arguments: object, **keywords: object) -> torch.Tensor:
        logits = plain(*arguments, **keywords)  # type: ignore[arg-type]
        shapes.append(logits.shape[1])
        return logits

    monkeypatch.setattr(compat, "forward", watched)
    teacher_forced_logprobs(llama, prompts(llama)[4], 20, chunk_size=6)
    assert shapes == [1, 1, 1, 5, 5]


def test_generated_logprobs_are_the_teacher_forced_ones(tiny: LoadedModel) -> None:
    prompt = prompts(tiny)[1]
    found = generate_greedy(tiny, [prompt], max_new_tokens=[12], stops=[never], chunk_size=512)[0]
    forced = teacher_forced_logprobs(tiny, [*prompt, *found.token_ids], len(prompt), chunk_size=5)
    largest = max(abs(a - b) for a, b in zip(found.logprobs, forced, strict=True))
    print(f"{tiny.name}: {largest:.2e}")
    assert largest < 1e-4
