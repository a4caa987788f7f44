"""Problem files: what each source yields from hand-written rows, and what it says of rows that it cannot use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cfkv.config import TraceConfig
from cfkv.errors import CfkvError
from cfkv.problems._base import Problem, problem_sources
from cfkv.traces.items import TraceItem, trace_items

SHARED = Path(__file__).parents[2] / "shared" / "data"
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "2 + 3?", "answer": "Add: 2+3=<<2+3=5>>5.\n#### 5"},
    "jsonl": {"question": "2 + 3?", "answer": "5"},
    "math500": {"problem": "2 + 3?", "solution": "Add.", "answer": "5", "unique_id": "test/algebra/1.json"},
    "aime": {"id": 60, "problem": "2 + 3?", "answer": "5"},
}
SOURCES = sorted(ROWS)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows (mappings, or raw lines) to a file."""

    def make(*rows: dict[str, Any] | str, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return make


def load(source: str, path: Path | None) -> list[Problem]:
    return list(problem_sources.get(source)().load(path, seed=0))


def refusal(source: str, path: Path | None) -> str:
    with pytest.raises(CfkvError) as caught:
        load(source, path)
    return str(caught.value)


def imported(path: Path | None, **fields: Any) -> list[TraceItem]:
    return trace_items(TraceConfig(mode="import", path=path, **fields))


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path


def test_gsm8k_by_hand(write: Write) -> None:
    """The calculator marks and the final line leave the solution; the answer keeps its spelling."""
    worked = "One box: 3*4=<<3*4=12>>12 eggs.\nAll: 12*100=<<12*100=1200>>1,200.\n#### 1,200"
    path = write({"question": "How many?", "answer": worked}, "", {"question": "Q", "answer": "#### -7 "})
    assert load("gsm8k", path) == [
        Problem(
            problem_id="gsm8k-00000",
            question="How many?",
            answer="1,200",
            solution="One box: 3*4=12 eggs.\nAll: 12*100=1,200.",
        ),
        Problem(problem_id="gsm8k-00001", question="Q", answer="-7", solution=""),
    ]


@pytest.mark.parametrize("answer", ["5", "#### 5\nand more", "####", "a #### \n"])
def test_gsm8k_needs_its_final_line(answer: str, write: Write) -> None:
    path = write({"question": "Q", "answer": answer})
    assert (
        refusal("gsm8k", path) == f"{path} line 1: field 'answer' has no final line '#### N'; is this GSM8K?"
    )


def test_jsonl_by_hand(write: Write) -> None:
    """Two names for the question; ids from the file where it has them, else from the row's number."""
    path = write(
        {"question": "a", "problem": "not used", "answer": "1", "problem_id": "p", "solution": "s"},
        {"problem": "b", "answer": "2", "id": 7, "solution": None},
        "  ",
        {"question": "Ω", "answer": "3"},
    )
    assert load("jsonl", path) == [
        Problem(problem_id="p", question="a", answer="1", solution="s"),
        Problem(problem_id="7", question="b", answer="2"),
        Problem(problem_id="problem-00002", question="Ω", answer="3"),
    ]


def test_math500_and_aime_by_hand(write: Write) -> None:
    assert load("math500", write(ROWS["math500"])) == [
        Problem(problem_id="test/algebra/1.json", question="2 + 3?", answer="5", solution="Add.")
    ]
    assert load("aime", write(ROWS["aime"], {"problem": "b", "answer": "033", "solution": "s"})) == [
        Problem(problem_id="aime-60", question="2 + 3?", answer="5"),
        Problem(problem_id="aime-problem-00001", question="b", answer="033", solution="s"),
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_parquet_gives_what_jsonl_gives(source: str, write: Write, tmp_path: Path) -> None:
    rows = [
        {**ROWS[source], **{key: f"{i}" for key in ("id", "unique_id") if key in ROWS[source]}}
        for i in range(300)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_parquet = load(source, tmp_path / "rows.parquet")
    assert from_parquet == load(source, write(*rows))
    assert len({problem.problem_id for problem in from_parquet}) == 300


@pytest.mark.parametrize("source", SOURCES)
def test_a_bad_line_is_named(source: str, write: Write) -> None:
    """Blank lines count as lines, so that the number is the editor's."""
    good = ROWS[source]
    path = write(good, "", '{"question": "cut')
    assert refusal(source, path).startswith(f"{path} line 3 is not valid JSON (")
    assert refusal(source, path).endswith("; mend or remove the line")
    path.write_bytes(json.dumps(good).encode() + b'\n{"a": "\xff"}\n')
    assert refusal(source, path).startswith(f"{path} line 2 is not valid JSON ('utf-8' codec can't decode")
    path = write(good, "[1, 2]")
    assert refusal(source, path) == f"{path} line 2 is list, not a JSON object"


@pytest.mark.parametrize("source", SOURCES)
def test_a_missing_or_wrong_field_is_named(source: str, write: Write) -> None:
    """With the fields that the row has, or the type and value that it has."""
    without = {key: value for key, value in ROWS[source].items() if key != "answer"}
    path = write(ROWS[source], without)
    have = ", ".join(sorted(without))
    assert refusal(source, path) == f"{path} line 2 has no field 'answer'; its fields: {have}"
    path = write({**ROWS[source], "answer": 5.5})
    assert refusal(source, path) == f"{path} line 1: field 'answer' is float (5.5), not a string"


@pytest.mark.parametrize("source", ["aime", "jsonl"])
def test_a_whole_number_is_an_answer(source: str, write: Write) -> None:
    """Many files store answers so; true and false are not numbers."""
    assert load(source, write({**ROWS[source], "answer": 204}))[0].answer == "204"
    path = write({**ROWS[source], "answer": True})
    assert refusal(source, path) == f"{path} line 1: field 'answer' is bool (True), not a string"


def test_other_field_messages(write: Write, tmp_path: Path) -> None:
    path = write({"answer": "5"})
    assert refusal("jsonl", path).endswith("line 1 has no field 'question' or 'problem'; its fields: answer")
    path = write({"answer": "5", "question": "q", "id": 1.5})
    assert refusal("jsonl", path).endswith("line 1: field 'id' is float, not a string or integer")
    pq.write_table(pa.table({"question": ["a", "b"], "answer": ["1", None]}), tmp_path / "null.parquet")
    path = tmp_path / "null.parquet"
    assert refusal("jsonl", path) == f"{path} row 2 has no field 'answer'; its fields: question"


@pytest.mark.parametrize("source", SOURCES)
def test_file_messages(source: str, write: Write, tmp_path: Path) -> None:
    """Not named, not there, of another kind, not what its suffix says."""
    assert refusal(source, None) == f"dataset {source!r} reads a file; name it with --path FILE.jsonl"
    assert refusal(source, tmp_path / "no.jsonl") == f"file {str(tmp_path / 'no.jsonl')!r} does not exist"
    table = write(ROWS[source], name="rows.csv")
    assert refusal(source, table) == f"file {str(table)!r} is neither .jsonl nor .parquet"
    fake = write(ROWS[source], name="rows.parquet")
    assert refusal(source, fake).startswith(f"{fake} is not a readable Parquet file (")


def test_registers_takes_no_file(write: Write) -> None:
    with pytest.raises(CfkvError, match="registers problems are generated, but a file was given"):
        next(iter(problem_sources.get("registers")().load(write(), seed=0)))


def test_trace_items_of_a_dataset(write: Write) -> None:
    path = write(*({"question": f"q{i}", "answer": f"{i}"} for i in range(5)))
    items = trace_items(TraceConfig(dataset="jsonl", path=path, limit=2))
    assert items == [
        TraceItem(problem_id=f"problem-0000{i}", sample_index=0, question=f"q{i}", reference_answer=f"{i}")
        for i in range(2)
    ]
    assert items[1].trace_id == "problem-00001/0"
    assert len(trace_items(TraceConfig(dataset="jsonl", path=path))) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "gsm8"}, "unknown dataset 'gsm8': did you mean 'gsm8k'"),
        ({"dataset": "registers"}, "'registers' generates problems without end; say how many with --limit"),
        ({"dataset": "jsonl"}, "dataset 'jsonl' reads a file; name it with --path FILE.jsonl"),
        ({"mode": "import"}, "--mode import reads a file of traces; name it with --path FILE.jsonl"),
    ],
)
def test_trace_items_messages(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CfkvError, match=message):
        trace_items(TraceConfig(**fields))


def test_no_items_and_ids_that_occur_twice(write: Write) -> None:
    empty = write()
    with pytest.raises(CfkvError) as caught:
        trace_items(TraceConfig(dataset="jsonl", path=empty))
    assert str(caught.value) == f"{empty} holds no problems; nothing to do"
    row = {"question": "q", "answer": "1"}
    path = write(
        {**row, "id": "a"}, {**row, "id": "b"}, {**row, "id": "a"}, {**row, "id": "b"}, {**row, "id": "c"}
    )
    with pytest.raises(CfkvError) as caught:
        trace_items(TraceConfig(dataset="jsonl", path=path))
    assert str(caught.value) == (
        f"{path}: 2 ids occur more than once (first: 'a/0', written as problem_id/sample_index); make problem_id "
        "unique, or number repeated samples with sample_index"
    )


def test_imported_traces_by_hand(write: Write) -> None:
    """Text or token ids; ids win where both are given; samples of one problem are numbered."""
    path = write(
        {"id": "p", "question": "q", "answer": "1", "response": "r"},
        {
            "id": "p",
            "question": "q",
            "answer": "1",
            "response": "s",
            "sample_index": 1,
            "finish_reason": "length",
        },
        {"prompt": "<q>", "reference_answer": "2", "response": "r", "response_token_ids": [3, 4]},
        {"prompt_token_ids": [1, 2], "prompt": "x", "answer": "3", "response_token_ids": [5]},
    )
    assert imported(path) == [
        TraceItem(problem_id="p", sample_index=0, question="q", reference_answer="1", response="r"),
        TraceItem(
            problem_id="p",
            sample_index=1,
            question="q",
            reference_answer="1",
            response="s",
            finish_reason="length",
        ),
        TraceItem(
            problem_id="trace-00002",
            sample_index=0,
            question="",
            reference_answer="2",
            prompt="<q>",
            response=(3, 4),
        ),
        TraceItem(
            problem_id="trace-00003",
            sample_index=0,
            question="",
            reference_answer="3",
            prompt=(1, 2),
            response=(5,),
        ),
    ]
    assert len(imported(path, limit=3)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response": None}, "line 1 has neither response nor response_token_ids; its fields: answer"),
        ({"question": None}, r"has no question \(or problem, prompt, prompt_token_ids\); its fields: answer"),
        ({"answer": None}, "has no field 'answer' or 'reference_answer'; its fields: question, response"),
        ({"sample_index": -1}, "field 'sample_index' is -1, not a whole number from 0"),
        ({"sample_index": True}, "field 'sample_index' is True, not a whole number from 0"),
        ({"response_token_ids": "3 4"}, "field 'response_token_ids' is str, not a list of token ids"),
        ({"response_token_ids": [3, -4]}, "field 'response_token_ids' holds -4, which is not a token id"),
        ({"prompt_token_ids": [3, 4.0]}, r"field 'prompt_token_ids' holds 4\.0, which is not a token id"),
        ({"prompt_token_ids": [True]}, "field 'prompt_token_ids' holds True, which is not a token id"),
    ],
)
def test_import_messages(change: dict[str, Any], message: str, write: Write) -> None:
    path = write({"question": "q", "answer": "1", "response": "r", **change})
    with pytest.raises(CfkvError, match=message):
        imported(path)


def test_the_released_gsm8k() -> None:
    """1319 test problems; Janet's ducks: (16 - 3 - 4) eggs at $2 are 18."""
    problems = load("gsm8k", shared("gsm8k_test.jsonl"))
    assert len(problems) == 1319
    assert problems[0].answer == "18"
    assert all(problem.answer.lstrip("-").replace(",", "").isdigit() for problem in problems)
    texts = [str(problem.solution) for problem in problems]
    assert not [text for text in texts if not text or "<<" in text or ">>" in text or "####" in text]


def test_the_released_competition_problems() -> None:
    """500 MATH problems with ids of their own; 30 AIME problems whose answers are 0 to 999."""
    math = load("math500", shared("math500.jsonl"))
    assert len({problem.problem_id for problem in math}) == 500
    aime = load("aime", shared("aime2024.jsonl"))
    assert len(aime) == 30
    assert all(0 <= int(problem.answer) <= 999 for problem in aime)
