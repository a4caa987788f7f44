"""The GPU script on a CPU: it runs both benches on a small model, and says what it could not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cfkv.bench import _peak
from pipelines.gpu_benchmarks import ONE_BILLION, main, write_problems

SMALL = ["--tiny", "--prefix", "64", "--candidates", "8", "--horizon", "4", "--chunk-size", "256"]
SMALL += ["--reasoning", "48", "--window", "16", "--traces", "1", "--answer-tokens", "16"]


def test_tiny_run_has_all_figures(tmp_path: Path) -> None:
    """Ratios, absolute times and the machine; a random model's answers run to the cap."""
    content = json.loads(main([*SMALL, "--out", str(tmp_path)]).read_text())
    assert [entry["bench"] for entry in content["benches"]] == ["oracle", "labels"]
    assert [entry["stopped"] for entry in content["benches"]] == [None, None]
    oracle, labels = ({row["metric"]: row["value"] for row in entry["rows"]} for entry in content["benches"])
    assert oracle["largest difference of KL"] < 1e-5
    assert labels["long answers: tokens per answer"] == 16
    assert labels["short answers: same tokens as literal"] == 1
    assert content["hardware"]["gpu"] is None
    assert content["hardware"]["dtype"] == "float32"
    assert content["benches"][0]["peak_memory_mib"] is None


def test_time_limit_is_kept_and_told(tmp_path: Path) -> None:
    """No time at all: nothing is measured, and the file says why."""
    content = json.loads(main([*SMALL, "--time-limit", "0.001", "--out", str(tmp_path)]).read_text())
    for entry in content["benches"]:
        assert entry["rows"] == []
        assert "time limit of 0.001 s" in entry["stopped"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the whole benchmark")
@pytest.mark.parametrize(("flags", "said"), [([], "CUDA device"), (["--tiny"], "--out FOLDER")])
def test_no_figures_without_a_gpu(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a slow CPU run nor a tiny model may end up among the benchmarks."""
    with pytest.raises(SystemExit):
        main(flags)
    assert said in capsys.readouterr().err


def test_sizes_are_those_of_a_billion_parameters() -> None:
    """Embeddings 262.7M, and per layer attention 10.5M and MLP 50.3M: 1.236B with norms."""
    hidden, kv = ONE_BILLION["hidden_size"], ONE_BILLION["num_key_value_heads"] * ONE_BILLION["head_dim"]
    attention = 2 * hidden * hidden + 2 * hidden * kv
    layer = attention + 3 * hidden * ONE_BILLION["intermediate_size"] + 2 * hidden
    total = ONE_BILLION["vocab_size"] * hidden + ONE_BILLION["num_hidden_layers"] * layer + hidden
    assert total == 1_235_814_400
    assert ONE_BILLION["num_attention_heads"] * ONE_BILLION["head_dim"] == hidden


def test_problems_have_the_length_asked_for(tmp_path: Path) -> None:
    """Whole words of the built-in vocabulary, one token each."""
    write_problems(tmp_path / "p.jsonl", 2, 300)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [len(line["answer"].partition("\n####")[0].split()) for line in lines] == [300, 300]
    assert lines[0]["question"] != lines[1]["question"]


def test_highest_peak_survives_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's record falls from 90 to 10 when it is reset; the highest stays 90 until the next watch."""
    record = {"peak": 90}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: record["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: record.update(peak=10))
    device = torch.device("cuda")
    _peak._reset(device)
    assert _peak.highest_bytes(device) == 90
    record["peak"] = 40
    assert _peak.highest_bytes(device) == 90
    _peak.watch_from_here(device)
    assert _peak.highest_bytes(device) == 10
    assert _peak.highest_bytes(torch.device("cpu")) is None
