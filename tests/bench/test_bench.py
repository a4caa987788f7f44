"""The benches run, write what they print, and count right; how fast they are is no test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cfkv.bench._base import Measured, as_json, benches
from cfkv.bench._peak import peak_bytes
from cfkv.cli import _guarded

SMALL = ["--model", "builtin", "--device", "cpu", "--threads", "1"]


def test_goals_have_a_direction() -> None:
    """At the goal it is met; without one there is nothing to meet."""
    assert Measured("a", 3.0, "x", 3.0, "higher").ok
    assert not Measured("a", 2.9, "x", 3.0, "higher").ok
    assert Measured("a", 1.1, "x", 1.1, "lower").ok
    assert not Measured("a", 1.2, "x", 1.1, "lower").ok
    assert Measured("a", 1.2, "x").ok is None


def test_json_has_the_fields_that_readers_expect() -> None:
    """One object per figure."""
    content = as_json("b", {"model": "m"}, [Measured("a", 2.0, "x", 3.0, "higher")])
    assert content == {
        "bench": "b",
        "machine": {"model": "m"},
        "rows": [{"metric": "a", "value": 2.0, "unit": "x", "goal": 3.0, "better": "higher", "ok": False}],
    }


def test_oracle_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 removals, the null row and the reference over a horizon of 4: 40 forwarded tokens."""
    file = tmp_path / "deep" / "o.json"
    sizes = ["--prefix", "64", "--candidates", "8", "--horizon", "4"]
    assert _guarded(["bench", "oracle", *SMALL, *sizes, "--json", str(file)]) == 0
    assert "times step by step" in capsys.readouterr().out
    rows = {row["metric"]: row["value"] for row in json.loads(file.read_text())["rows"]}
    assert rows["forwarded"] == 40
    assert rows["largest difference of KL"] < 1e-5
    assert rows["lower bound: these tokens at the plain speed"] > 0


def test_labels_runs(tmp_path: Path) -> None:
    """All windows as the literal protocol has them, and no token too many."""
    file = tmp_path / "l.json"
    assert (
        _guarded(["bench", "labels", *SMALL, "--traces", "1", "--answer-tokens", "6", "--json", str(file)])
        == 0
    )
    rows = {row["metric"]: row["value"] for row in json.loads(file.read_text())["rows"]}
    for case in ("short answers", "long answers"):
        assert rows[f"{case}: same tokens as literal"] == 1
        assert rows[f"{case}: forwarded / needed"] == 1
        assert rows[f"{case}: traces"] == 1


def test_probe_runs(tmp_path: Path) -> None:
    """Streaming takes linear memory, holding everything quadratic: the reach differs by orders of magnitude."""
    file = tmp_path / "p.json"
    assert _guarded(["bench", "probe", *SMALL, "--tokens", "128", "--json", str(file)]) == 0
    rows = {row["metric"]: row["value"] for row in json.loads(file.read_text())["rows"]}
    assert rows["context, streamed / held"] > 16
    slopes = [value for metric, value in rows.items() if "memory per token" in metric]
    assert len(slopes) == 3
    assert max(slopes) < 1.5 * min(slopes)


def test_unknown_bench(capsys: pytest.CaptureFixture[str]) -> None:
    """The legal names are given."""
    assert _guarded(["bench", "orcale"]) == 2
    assert "oracle" in capsys.readouterr().err
    assert benches.names() == sorted(benches.names())


def test_peak_by_hand() -> None:
    """4 MB, a view of it, 4 MB more; the first is freed but for its view, so that a third makes 12 MB."""

    def work() -> None:
        first = torch.zeros(1000, 1000)
        view = first.view(-1)[:10]
        second = first + 1
        del first
        third = second.t().contiguous()
        del view, second, third

    def turns() -> None:
        for _ in range(5):
            held = torch.zeros(1000, 1000)
            del held

    assert peak_bytes(work, torch.device("cpu")) == 12_000_000
    assert peak_bytes(turns, torch.device("cpu")) == 4_000_000


def test_decode_runs(tmp_path: Path) -> None:
    """The slow loops and the batches write what the fixed slots write."""
    file = tmp_path / "d.json"
    sizes = ["--slots", "64", "--steps", "6", "--positions", "160", "--sequences", "3"]
    assert _guarded(["bench", "decode", *SMALL, *sizes, "--json", str(file)]) == 0
    rows = {row["metric"]: row["value"] for row in json.loads(file.read_text())["rows"]}
    assert [rows[f"{slots} slots: same tokens"] for slots in (64, 256)] == [1, 1]
    assert rows["3 sequences: same answers"] == 1
    assert rows["16 arms: same answers"] == 1
    assert sum("added / no policy" in metric for metric in rows) == 6
