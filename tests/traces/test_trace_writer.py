"""Rows of the three ways to a trace, made by the built-in model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cfkv.answers import exact_match
from cfkv.config import Execution, ModelConfig, TraceConfig
from cfkv.models.loading import LoadedModel
from cfkv.models.sources import NAMED
from cfkv.models.tokens import decode, encode
from cfkv.traces.items import TraceItem, trace_items
from cfkv.traces.stage import absolute
from cfkv.traces.write import TraceWriter

Row = dict[str, Any]


def write(
    loaded: LoadedModel,
    config: TraceConfig,
    items: Sequence[TraceItem],
    batch_size: int = 8,
    chunk: int = 512,
) -> list[Row]:
    ticks: list[int] = []
    execution = Execution(device="cpu", batch_size=batch_size, chunk_size=chunk)
    rows = TraceWriter(loaded, config, execution, exact_match).rows(items, ticks.append)
    assert sum(ticks) == len(items)
    assert [row["trace_id"] for row in rows] == [item.trace_id for item in items]
    return rows


def greedy(loaded: LoadedModel, context: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without a cache."""
    ids = torch.tensor([list(context)])
    for _ in range(count):
        ids = torch.cat([ids, loaded.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(context) :].tolist()


def plain_logprobs(loaded: LoadedModel, ids: Sequence[int], start: int) -> torch.Tensor:
    logits = loaded.model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
    return torch.stack([logits[place - 1, ids[place]] for place in range(start, len(ids))])


def check_ok_row(loaded: LoadedModel, row: Row) -> float:
    """What holds for every good row; returns the largest difference of its log-probabilities."""
    ids, start = row["token_ids"], row["prompt_len"]
    assert row["status"] == "ok"
    assert (
        start <= row["reasoning_start"] < row["reasoning_stop"] <= row["answer_start"] <= row["answer_stop"]
    )
    assert row["answer_stop"] <= len(ids)
    assert "".join(row["token_texts"]) == decode(loaded.tokenizer, ids)
    assert row["output_text"] == decode(loaded.tokenizer, ids[start:])
    assert row["correct"] == (row["answer"] == row["reference_answer"])
    assert len(row["logprobs"]) == len(ids) - start
    return float((torch.tensor(row["logprobs"]) - plain_logprobs(loaded, ids, start)).abs().max())


def same_rows(first: list[Row], second: list[Row]) -> float:
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        assert {k: v for k, v in a.items() if k != "logprobs"} == {
            k: v for k, v in b.items() if k != "logprobs"
        }
        pairs = zip(a.get("logprobs", []), b.get("logprobs", []), strict=True)
        largest = max([largest, *(abs(x - y) for x, y in pairs)])
    return largest


GENERATE = TraceConfig(limit=5, max_new_tokens=300, seed=11)


@pytest.fixture(scope="module")
def generated(builtin: LoadedModel) -> list[Row]:
    return write(builtin, GENERATE, trace_items(GENERATE))


def test_generated_rows(builtin: LoadedModel, generated: list[Row]) -> None:
    items = trace_items(GENERATE)
    largest = max(check_ok_row(builtin, row) for row in generated)
    print(f"largest difference of log-probabilities: {largest:.2e}")
    assert largest < 1e-4
    for row, item in zip(generated, items, strict=True):
        ids = row["token_ids"]
        assert ids[: row["prompt_len"]] == builtin.tokenizer(item.question)["input_ids"]
        assert row["reasoning_start"] == row["prompt_len"]
        assert row["boundary"] == "think_end"
        marker = encode(builtin.tokenizer, "</think>")
        assert ids[row["reasoning_stop"] : row["answer_start"]] == marker
        assert row["finish_reason"] == "boxed"
        assert row["answer_stop"] == len(ids)  # decoding stops where the box closes
        assert row["answer_prefix"] == ""
        assert row["reference_answer"] == item.reference_answer
        assert (row["model"], row["weights"]) == ("builtin", "float32")
    assert sum(row["correct"] for row in generated) >= 4


def test_answer_is_what_greedy_decoding_writes_after_the_context(
    builtin: LoadedModel, generated: list[Row]
) -> None:
    for row in generated[:2]:
        answer = row["token_ids"][row["answer_start"] : row["answer_stop"]]
        assert greedy(builtin, row["token_ids"][: row["answer_start"]], len(answer)) == answer


def test_batch_size_changes_no_generated_row(builtin: LoadedModel, generated: list[Row]) -> None:
    largest = same_rows(generated, write(builtin, GENERATE, trace_items(GENERATE), batch_size=1, chunk=9))
    print(f"batch 1 and 8: largest difference of log-probabilities {largest:.2e}")
    assert largest < 1e-4


def test_cap_on_new_tokens(builtin: LoadedModel) -> None:
    config = GENERATE.model_copy(update={"max_new_tokens": 80, "limit": 1})
    (row,) = write(builtin, config, trace_items(config))
    assert len(row["token_ids"]) - row["prompt_len"] == 80
    assert (row["finish_reason"], row["boundary"], row["correct"]) == ("length", "tail", False)
    config = config.model_copy(update={"max_new_tokens": 30})
    (row,) = write(builtin, config, trace_items(config))
    assert row["status"] == "no_reasoning"  # 30 tokens are less than the tail
    assert "token_ids" not in row


def test_prompt_that_fills_all_positions_is_too_long(builtin: LoadedModel) -> None:
    limit = builtin.shape.max_positions
    items = [
        TraceItem(problem_id=f"p{n}", sample_index=0, question="ask " * n, reference_answer="")
        for n in (limit, limit - 1, 10)
    ]
    rows = write(builtin, GENERATE.model_copy(update={"max_new_tokens": 80}), items)
    assert rows[0]["status"] == "too_long"
    assert rows[0]["reason"] == f"{limit + 1} tokens are more than the model's {limit} positions"
    assert rows[1]["status"] == "no_reasoning"  # room for one token
    assert "too_long" not in (rows[1]["status"], rows[2]["status"])


@pytest.mark.parametrize("prefix", ["", "\\boxed{"])
def test_worked_solution_rows(builtin: LoadedModel, prefix: str) -> None:
    config = TraceConfig(mode="worked_solution", limit=4, seed=11, answer_prefix=prefix)
    items = trace_items(config)
    rows = write(builtin, config, items)
    largest = max(check_ok_row(builtin, row) for row in rows)
    assert largest < 1e-4
    tokenizer = builtin.tokenizer
    for row, item in zip(rows, items, strict=True):
        ids = row["token_ids"]
        assert decode(tokenizer, ids[row["reasoning_start"] : row["reasoning_stop"]]) == item.solution
        assert row["reasoning_start"] == row["prompt_len"]  # the prompt has opened the reasoning already
        between = f"</think> {prefix}".rstrip()
        assert decode(tokenizer, ids[row["reasoning_stop"] : row["answer_start"]]) == between
        assert (row["boundary"], row["answer_prefix"]) == ("given", prefix)
        assert row["finish_reason"] == "boxed"
        answer = ids[row["answer_start"] : row["answer_stop"]]
        assert greedy(builtin, ids[: row["answer_start"]], len(answer)) == answer
        assert decode(tokenizer, answer).endswith("}")
    assert sum(row["correct"] for row in rows) >= 3
    small = write(builtin, config, items, batch_size=1, chunk=9)
    again = same_rows(rows, small)
    print(f"prefix {prefix!r}: plain forward {largest:.2e}, batch 1 and 8 {again:.2e}")
    assert again < 1e-4


def test_worked_solution_opens_the_reasoning_if_the_prompt_does_not(builtin: LoadedModel) -> None:
    item = TraceItem(
        problem_id="p", sample_index=0, question="ask 4", reference_answer="", solution="now we go on"
    )
    config = TraceConfig(mode="worked_solution", answer_prefix="", answer_max_new_tokens=5, min_reasoning=4)
    (row,) = write(builtin, config, [item])
    assert row["token_texts"][:3] == ["ask", " 4", " <think>"]
    assert (row["prompt_len"], row["reasoning_start"], row["reasoning_stop"]) == (2, 3, 7)
    assert len(row["token_ids"]) <= row["answer_start"] + 5
    (row,) = write(builtin, config.model_copy(update={"min_reasoning": 5}), [item])
    assert (row["status"], "4 tokens" in row["reason"]) == ("skipped", True)
    bare = TraceItem(problem_id="p", sample_index=0, question="ask 4", reference_answer="")
    (row,) = write(builtin, config, [bare])
    assert row["status"] == "no_solution"


def imported(
    builtin: LoadedModel, tmp_path: Path, records: list[dict[str, Any]], **options: Any
) -> list[Row]:
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    config = TraceConfig(mode="import", path=path, **options)
    return write(builtin, config, trace_items(config), batch_size=2)


def test_imported_rows(builtin: LoadedModel, generated: list[Row], tmp_path: Path) -> None:
    """A generated trace comes back as it was, from token ids and from text."""
    row = generated[0]
    start = row["prompt_len"]
    base = {"question": "q", "answer": row["reference_answer"], "problem_id": "p"}
    prompt = decode(builtin.tokenizer, row["token_ids"][:start])
    records = [
        {
            **base,
            "prompt_token_ids": row["token_ids"][:start],
            "response_token_ids": row["token_ids"][start:],
        },
        {**base, "prompt": prompt, "response": row["output_text"], "sample_index": 1},
        {**base, "question": prompt, "response": row["output_text"], "sample_index": 2},
    ]
    rows = imported(builtin, tmp_path, records)
    for number, found in enumerate(rows):
        assert check_ok_row(builtin, found) < 1e-4
        assert found["trace_id"] == f"p/{number}"
        assert (found["finish_reason"], found["dataset"]) == ("imported", "import")
        for name in ("token_ids", "answer_start", "answer_stop", "reasoning_stop", "answer", "correct"):
            assert found[name] == row[name]


def test_imported_failures_are_rows(builtin: LoadedModel, generated: list[Row], tmp_path: Path) -> None:
    row = generated[0]
    start, limit = row["prompt_len"], builtin.shape.max_positions
    prompt, response = row["token_ids"][:start], row["token_ids"][start:]
    marker = encode(builtin.tokenizer, "</think>")
    cases = {
        "too_long": (prompt, [*[20] * (limit - start), *marker]),
        "unknown_token": (prompt, [5, builtin.shape.vocabulary, *response]),
        "empty_prompt": ([], response),
        "empty_response": (prompt, []),
        "no_reasoning": (prompt, [*marker, 20, 21]),
        "skipped": (prompt, [20, 21, *marker, 20]),
        "ok": (prompt, response),
    }
    records = [
        {"question": "q", "answer": "a", "problem_id": name, "prompt_token_ids": p, "response_token_ids": r}
        for name, (p, r) in cases.items()
    ]
    rows = imported(builtin, tmp_path, records, min_reasoning=3)
    assert [row["status"] for row in rows] == list(cases)
    assert all(row["reason"] for row in rows[:-1])
    assert rows[0]["reason"] == f"{limit + 1} tokens are more than the model's {limit} positions"


def test_imported_trace_of_exactly_all_positions(
    builtin: LoadedModel, generated: list[Row], tmp_path: Path
) -> None:
    prompt, limit = generated[0]["token_ids"][:20], builtin.shape.max_positions
    response = [*[20] * (limit - 21), *encode(builtin.tokenizer, "</think>")]
    record = {"question": "q", "answer": "a", "prompt_token_ids": prompt, "response_token_ids": response}
    (row,) = imported(builtin, tmp_path, [record])
    assert (row["status"], len(row["token_ids"]), row["answer"]) == ("ok", limit, None)


def test_a_run_directory_called_like_a_model_does_not_become_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by tracing into a folder named builtin: every later command took the run for the model."""
    (tmp_path / "builtin").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute(ModelConfig(model="builtin"), "model", NAMED).model == "builtin"
    assert absolute(ModelConfig(model="./builtin"), "model", NAMED).model == str(tmp_path / "builtin")
