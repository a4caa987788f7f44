"""A user's mistake gives one clear message or a failure row, the documented exit code, and no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

import cfkv
from cfkv.cli import _guarded

Cfkv = Callable[..., tuple[int, str]]

SOLVED = r"%m =6 6 ; </think> \boxed{ R1=6 }"


@pytest.fixture
def run_cfkv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cfkv:
    """Run the command line in tmp_path; returns the exit code and what was printed to stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = _guarded([str(argument) for argument in arguments])
        return code, capsys.readouterr().err

    return run


def write_lines(path: Path, *rows: object) -> Path:
    """A JSONL file; text rows are written as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def imported(identity: str, response: object, answer: str = "R1=6") -> dict[str, object]:
    """One row of traces to import."""
    return {"problem_id": identity, "question": "ask 4", "answer": answer, "response": response}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trase", "d"], 'Unknown command "trase". Did you mean "trace"?'),
        (["trace", "d", "--limt", "3"], "Unknown option: --limt. Did you mean --limit?"),
        (["trace", "d", "--limit", "few"], "limit = 'few': Input should be a valid integer"),
        (["trace", "d", "--limit", "0"], "limit = '0': Input should be greater than or equal to 1"),
        (["trace", "d", "--dataset", "gsm8"], "unknown dataset 'gsm8': did you mean 'gsm8k'?"),
        (["trace", "d", "--dataset", "gsm8k"], "name it with --path FILE.jsonl"),
        (
            ["trace", "d", "--limit", "2", "--model", "smolm2"],
            "unknown model 'smolm2': did you mean 'smollm2'?",
        ),
        (["trace", "d", "--limit", "2", "--model", "./none"], "a folder with config.json, a .gguf file"),
        (["trace", "d", "--limit", "2", "--model", "none.gguf"], "model file 'none.gguf' does not exist"),
        (["trace", "d", "--limit", "2", "--shard", "2/2"], "is not i/n with i below n"),
        (["label", "d", "--kind", "oclusion"], "unknown label 'oclusion': did you mean 'occlusion'?"),
        (["label", "d"], "d has no 'trace' stage yet; run `cfkv trace d` first"),
        (["probe", "d", "--groups", "hiden"], "unknown signal group 'hiden': did you mean 'hidden'?"),
        (["correlate", "d"], "d has no labels yet"),
        (["report", "d"], "run `cfkv correlate d` first"),
        (["ls", "signal"], "unknown family 'signal': did you mean 'signals'?"),
        (["run", "none.yaml"], "recipe 'none.yaml' does not exist"),
    ],
)
def test_usage_errors(run_cfkv: Cfkv, tmp_path: Path, arguments: list[str], expected: str) -> None:
    """Exit code 2, one message on stderr, and no run directory left behind."""
    code, printed = run_cfkv(*arguments)
    assert (code, "Traceback" in printed) == (2, False)
    assert printed.startswith("error: ")
    assert expected in printed
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trace:\n  limt: 3\n", "unknown key 'trace.limt': did you mean 'trace.limit'"),
        ("trase:\n  limit: 3\n", "unknown key 'trase': did you mean 'trace'?"),
        ("trace: [1\n", "not valid YAML: line 2, column 1"),
        ("trace:\n  limit: many\n", "trace.limit = 'many': Input should be a valid integer"),
        ("- 1\n", "must be a mapping of stages"),
        ("probe:\n  groups: [hiden]\n", "unknown signal group 'hiden'"),
    ],
)
def test_recipe_errors_come_before_any_work(run_cfkv: Cfkv, tmp_path: Path, text: str, expected: str) -> None:
    """A recipe is checked whole before its first stage."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    code, printed = run_cfkv("run", "r.yaml", "d", "--set", "trace.limit=2")
    assert code == 2
    assert expected in printed
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (['{"question": broken'], "t.jsonl line 1 is not valid JSON"),
        ([imported("a", SOLVED), {"question": "q", "response": "x"}], "t.jsonl line 2 has no field 'answer'"),
        (
            [{"question": "q", "answer": "1"}],
            "neither response nor response_token_ids; its fields: answer, question",
        ),
        ([imported("a", 5)], "field 'response' is int (5), not a string"),
        ([imported("a", SOLVED), imported("a", SOLVED)], "1 ids occur more than once (first: 'a/0'"),
        ([], "holds no problems"),
    ],
)
def test_files_to_import(run_cfkv: Cfkv, tmp_path: Path, rows: list[object], expected: str) -> None:
    """A broken line, a missing field, a non-string, a duplicate id, nothing at all: the place is named."""
    write_lines(tmp_path / "t.jsonl", *rows)
    code, printed = run_cfkv("trace", "d", "--mode", "import", "--path", "t.jsonl")
    assert code == 2
    assert expected in printed


def test_items_that_fail_are_rows_with_a_reason(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """An empty response, no boundary and too many tokens fail alone; the others are kept; exit code 1."""
    write_lines(
        tmp_path / "t.jsonl",
        imported("good", SOLVED),
        imported("empty", ""),
        imported("bare", "%m =6"),
        imported("long", " ".join(["now"] * 600) + " " + SOLVED),
    )
    code, _ = run_cfkv("trace", "d", "--mode", "import", "--path", "t.jsonl")
    assert code == 1
    rows = {row["problem_id"]: row for row in cfkv.load(tmp_path / "d").traces.collect().to_dicts()}
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": "ok",
        "empty": "empty_response",
        "bare": "no_reasoning",
        "long": "too_long",
    }
    # 2 prompt words, 600 words, 7 of SOLVED (%m =6 6 ; </think> \boxed{ R1=6 }): 2 + 600 + 8.
    assert rows["long"]["reason"] == "610 tokens are more than the model's 512 positions"
    assert rows["good"]["correct"] is True


def test_no_correct_trace(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """Labelling says so and says where to look."""
    write_lines(tmp_path / "t.jsonl", imported("a", SOLVED, answer="R1=5"))
    assert run_cfkv("trace", "d", "--mode", "import", "--path", "t.jsonl")[0] == 0
    code, printed = run_cfkv("label", "d")
    assert code == 2
    assert "none of 1 traces is correct (1 without failure)" in printed


def test_reasoning_shorter_than_a_window(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """One window, clipped to the span (methods 5.1); here the span is 4 tokens and the window 32."""
    assert run_cfkv("trace", "d", "--limit", "1", "--max-new-tokens", "384")[0] == 0
    traces = cfkv.load(tmp_path / "d").traces.collect()
    ids = traces["token_ids"][0].to_list()
    start, stop = traces["reasoning_start"][0], traces["reasoning_stop"][0]
    short = {
        "question": "",
        "prompt_token_ids": ids[: stop - 4],
        "response_token_ids": ids[stop - 4 :],
        "answer": traces["answer"][0],
    }
    write_lines(tmp_path / "t.jsonl", short)
    assert run_cfkv("trace", "e", "--mode", "import", "--path", "t.jsonl")[0] == 0
    assert run_cfkv("label", "e", "--max-new-tokens", "16")[0] == 0
    windows = cfkv.load(tmp_path / "e").windows.collect()
    assert windows.select("start", "stop").rows() == [(stop - 4, stop)]
    assert start < stop - 4


def test_another_configuration_is_refused_with_the_difference(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """Nothing is overwritten without being asked, and what is there stays."""
    assert run_cfkv("trace", "d", "--limit", "2", "--max-new-tokens", "384")[0] == 0
    assert run_cfkv("label", "d", "--window", "16", "--stride", "8", "--max-new-tokens", "16")[0] == 0
    before = cfkv.load(tmp_path / "d").windows.collect()
    code, printed = run_cfkv("label", "d", "--window", "8")
    assert code == 2
    assert "config.label.window: 16 -> 8" in printed
    assert cfkv.load(tmp_path / "d").windows.collect().equals(before)
    assert run_cfkv("label", "d", "--window", "8", "--overwrite")[0] == 0
    after = cfkv.load(tmp_path / "d").windows.collect()
    assert (after["stop"] - after["start"]).max() == 8


def test_damaged_and_newer_runs(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """A truncated part is named by readers and rewritten by its stage; a newer manifest is refused."""
    assert run_cfkv("trace", "d", "--limit", "2", "--max-new-tokens", "384")[0] == 0
    part = tmp_path / "d" / "traces" / "part-00000.parquet"
    whole = pl.read_parquet(part)
    part.write_bytes(part.read_bytes()[:500])
    code, printed = run_cfkv("label", "d")
    assert code == 2
    assert "1 of 1 parts of stage 'trace' are missing" in printed
    with pytest.raises(cfkv.errors.CfkvError, match="cannot be read"):
        cfkv.load(tmp_path / "d").traces.collect()
    assert run_cfkv("trace", "d")[0] == 0
    assert pl.read_parquet(part).equals(whole)
    manifest = tmp_path / "d" / "run.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
    code, printed = run_cfkv("label", "d")
    assert code == 2
    assert "has version 99; this cfkv reads up to 1: upgrade cfkv" in printed
