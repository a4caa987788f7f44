"""Every stage on the built-in model, in one process, in two, in two shards, and after a kill."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml
from real_runs import ACCELERATE, EVALUATED, TORCHRUN, assert_same, cfkv_process, finish, tables

import cfkv
from cfkv.cli import _guarded
from cfkv.problems.registers import planted_truth
from cfkv.workers import owner

RECIPE = {
    "trace": {"dataset": "registers", "limit": 7, "max_new_tokens": 384, "part_size": 2},
    "label": [
        {"kind": "occlusion", "window": 8, "stride": 4, "max_new_tokens": 16},
        {"kind": "eviction_kl", "every": 60, "block": 4},
    ],
    "probe": {"groups": ["hidden", "kv", "agreement"]},
    "correlate": {"draws": 100, "smoothings": ["raw", "rolling_z"]},
}


def recipe_file(folder: Path) -> Path:
    """RECIPE as YAML."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe run in this process."""
    folder = tmp_path_factory.mktemp("reference")
    assert _guarded(["run", str(recipe_file(folder)), str(folder / "run")]) == 0
    return folder / "run"


def test_every_table_and_picture_is_there(reference: Path) -> None:
    """Counts by hand: 7 problems in parts of 2 make 4 parts; 5 + 4 layers; 5 + 11 signals."""
    found = tables(reference)
    assert len(list((reference / "traces").glob("part-*.parquet"))) == 4
    assert len(found["traces"]) == 7
    correct = found["traces"].filter("correct")["trace_id"].to_list()
    for kind in ("occlusion", "eviction_kl"):
        assert sorted(found["token_labels"].filter(kind=kind)["trace_id"]) == sorted(correct)
    # Per trace: hidden for the embedding and 4 blocks, kv for 4 blocks.
    assert len(found["signals"]) == 7 * (5 + 4)
    assert (len(found["gate_signals"]), len(found["head_agreement"])) == (7, 7 * 4)
    # Per label kind: 3 hidden signals on 5 layers, 2 hidden and 11 kv signals on 4, each with 2 smoothings and
    # 5 measures; position x 5.
    assert len(found["correlations"]) == 2 * ((3 * 5 + (2 + 11) * 4) * 2 * 5 + 5)
    page = (reference / "report.html").read_text(encoding="utf-8")
    assert "7 traces of 7 problems" in page
    assert {path.suffix for path in (reference / "figures").iterdir()} == {".png", ".svg", ".csv"}
    manifest = cfkv.load(reference).manifest
    assert [check["ok"] for check in manifest["stages"]["trace"]["self_check"]] == [True, True, True, True]
    assert all("finished" in stage for stage in manifest["stages"].values())


def test_labels_find_the_planted_truth(reference: Path) -> None:
    """Load-bearing tokens are labelled important; tokens a window away from every fact are not."""
    found = tables(reference)
    labels = found["token_labels"].filter(kind="occlusion")
    rows = found["traces"].join(labels, on="trace_id").to_dicts()
    important, idle = [], []
    for row in rows:
        span = slice(row["reasoning_start"], row["reasoning_stop"])
        words = "".join(row["token_texts"][span]).split()
        labels = np.array(row["importance"][span])
        truth = planted_truth(words)
        assert len(words) == len(labels)
        assert set(row["importance"][: span.start]) == {-1}
        assert set(row["importance"][span.stop :]) == {-1}
        near = np.convolve(truth.fact, np.ones(17), mode="same") > 0
        important += labels[truth.fused].tolist()
        idle += labels[~near].tolist()
    assert len(important) == 4 * len(rows)
    assert np.mean(important) >= 0.9
    assert np.mean(idle) <= 0.02


def test_running_again_changes_nothing(reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All parts are found done, with or without the recipe."""
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("part-*.parquet")}
    assert _guarded(["run", str(reference.parent / "small.yaml"), str(reference)]) == 0
    assert _guarded(["label", str(reference)]) == 0
    assert "(0 parts written, 4 already done)" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("part-*.parquet")} == before


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_two_processes_give_the_same_tables(
    launcher: tuple[str, ...], reference: Path, tmp_path: Path
) -> None:
    """Both did some; only rank 0 prints."""
    run = tmp_path / "run"
    printed = finish(cfkv_process("run", str(recipe_file(tmp_path)), str(run), launcher=launcher))
    assert printed.count("label:occlusion:") == 1
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    assert {event["worker"] for event in events if event["event"] == "part_written"} == {0, 1}
    assert_same(reference, run, empty=EVALUATED)


def test_a_failed_item_ends_no_other_process(tmp_path: Path) -> None:
    """Rank 1 has an empty response; the launcher must not end rank 0 for it, and the exit code says so at the end."""
    row = {"question": "ask 4", "answer": "R1=6", "response": r"%m =6 6 ; </think> \boxed{ R1=6 }"}
    rows = [{**row, "problem_id": f"p{i}"} for i in range(8)]
    empty = next(part for part in range(8) if owner(part, 2) == 1)
    rows[empty]["response"] = ""
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    run = tmp_path / "run"
    arguments = ("--mode", "import", "--path", str(tmp_path / "t.jsonl"), "--part-size", "1")
    process = cfkv_process("trace", str(run), *arguments, launcher=TORCHRUN)
    process.communicate(timeout=200)
    assert process.returncode == 1
    statuses = cfkv.load(run).traces.collect()["status"].to_list()
    assert statuses == ["empty_response" if part == empty else "ok" for part in range(8)]


def test_shards_give_the_same_tables(reference: Path, tmp_path: Path) -> None:
    """The first leaves the analysis to others, and what the recipe says of it; other commands finish the run."""
    recipe, run = str(recipe_file(tmp_path)), str(tmp_path / "run")
    assert _guarded(["run", recipe, run, "--shard", "1/2"]) == 0
    assert not (tmp_path / "run" / "report.html").exists()
    assert _guarded(["correlate", run]) == 2
    for command in (["trace"], ["label"], ["label", "--kind", "eviction_kl"], ["probe"]):
        assert _guarded([command[0], run, *command[1:], "--shard", "0/2"]) == 0
    assert _guarded(["correlate", run]) == 0
    assert _guarded(["report", run]) == 0
    assert_same(reference, tmp_path / "run", empty=EVALUATED)


def test_a_killed_run_goes_on(reference: Path, tmp_path: Path) -> None:
    """SIGKILL after the first labels part; the same command gives the same tables, and redoes no finished part."""
    recipe, run = str(recipe_file(tmp_path)), tmp_path / "run"
    process = cfkv_process("run", recipe, str(run))
    first = run / "token_labels" / "kind=occlusion" / "part-00000.parquet"
    pause = threading.Event()
    while not first.exists() and process.poll() is None:
        pause.wait(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert first.exists()
    assert not (run / "report.html").exists()
    before = first.stat().st_mtime_ns
    assert _guarded(["run", recipe, str(run)]) == 0
    assert first.stat().st_mtime_ns == before
    assert_same(reference, run, empty=EVALUATED)


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Items, forwards, tokens and disk of each stage."""
    assert _guarded(["run", str(recipe_file(tmp_path)), str(tmp_path / "run"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for word in ("trace", "label:occlusion", "probe:hidden", "items", "forwards", "tokens", "disk"):
        assert word in printed
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_windows_exactly_once_traces_exist(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the formula of methods 5.1 over all traces: ceil(max(N - 8, 0) / 4) + 1; the wrong ones only bound it."""
    assert _guarded(["label", str(reference), "--dry-run"]) == 0
    found = tables(reference)
    lengths = (found["traces"]["reasoning_stop"] - found["traces"]["reasoning_start"]).to_list()
    planned = sum(math.ceil(max(length - 8, 0) / 4) + 1 for length in lengths)
    assert f"<= {planned:,} " in capsys.readouterr().out
    assert len(found["windows"]) <= planned


def test_a_run_is_a_dataset(reference: Path) -> None:
    """`datasets.load_dataset(DIR, TABLE)` reads the card's configurations."""
    datasets = pytest.importorskip("datasets")
    for name in ("traces", "token_labels", "windows", "signals_hidden", "correlations"):
        loaded = datasets.load_dataset(
            str(reference), name, split="train", cache_dir=str(reference.parent / "hf")
        )
        assert len(loaded) > 0
    frame = tables(reference)["windows"]
    assert datasets.load_dataset(
        str(reference), "windows", split="train", cache_dir=str(reference.parent / "hf")
    ).num_rows == len(frame)


def test_doctor_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    """What a model is and can do; what can be named."""
    assert _guarded(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in ("4 layers: 4 full_attention", "2 KV heads", "'<pad>' (0)", "'<eos>' (3)", "</think> = [5]"):
        assert word in printed
    assert "FAILED" not in printed
    for family, member in (
        ("signals", "hidden_cosine_diff"),
        ("labels", "occlusion"),
        ("problems", "registers"),
        ("models", "smollm2"),
    ):
        assert _guarded(["ls", family]) == 0
        assert member in capsys.readouterr().out
