"""A run that is killed without warning continues, and ends as if nothing had happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import toy_stage
from toy_stage import parts, rows, run_toy

from cfkv import store
from cfkv.schemas import PROBED, SIGNALS
from cfkv.stage import Run
from cfkv.workers import Workers


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    path = tmp_path_factory.mktemp("whole")
    run_toy(path)
    return path


def killed(path: Path, when: str, count: int) -> None:
    command = [sys.executable, toy_stage.__file__, str(path), when, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


# Parts hold items 1-3, 4-6, 7-9 and 10, and each is two files: signals, then probed.
@pytest.mark.parametrize(
    ("when", "count", "parts_done", "rows_there"),
    [
        ("item", 1, 0, 0),
        ("item", 5, 1, 9),  # an item has two rows of signals and one of status
        ("item", 10, 3, 27),
        ("rename", 1, 0, 0),
        ("rename", 4, 1, 15),  # part 1 has its signals but not its statuses
        ("rename", 8, 3, 29),
    ],
)
def test_killed_and_continued_equals_uninterrupted(
    when: str, count: int, parts_done: int, rows_there: int, whole: Path, tmp_path: Path
) -> None:
    """Row for row and byte for byte; only what was not done is done again."""
    killed(tmp_path, when, count)
    assert len(Run(tmp_path).missing_parts("probe:toy")) == 4 - parts_done
    assert len(rows(tmp_path)) == rows_there
    calls: list[int] = []
    result = run_toy(tmp_path, on_item=calls.append)
    assert result.parts_found == parts_done
    assert calls == list(range(3 * parts_done, 10))
    assert rows(tmp_path) == rows(whole)
    assert parts(tmp_path) == parts(whole)


def test_killed_thrice_and_continued_by_two_processes(whole: Path, tmp_path: Path) -> None:
    """Each life gets one part further; then another world size ends the run."""
    for count in (5, 5, 4):  # a part of three items, and some of the next
        killed(tmp_path, "item", count)
    assert Run(tmp_path).missing_parts("probe:toy") == [3]
    run_toy(tmp_path, crew=Workers(1, 2))  # parts 1 and 2, which are there
    assert run_toy(tmp_path, crew=Workers(0, 2)).parts_written == 1
    assert rows(tmp_path) == rows(whole)


def test_what_a_kill_leaves_is_no_part(tmp_path: Path) -> None:
    """The half-written file exists under another name, and no reader sees it."""
    killed(tmp_path, "rename", 1)
    files = [path.name for path in (tmp_path / "signals/group=toy").iterdir()]
    assert [
        name for name in files if name.startswith(".part-00000.parquet.") and name.endswith(".tmp")
    ] == files
    assert len(files) == 1
    assert store.part_paths(tmp_path, SIGNALS, "toy") == {}
    assert store.scan(tmp_path, SIGNALS, "toy").collect().height == 0
    assert store.scan(tmp_path, PROBED, "toy").collect().height == 0


def test_what_a_kill_leaves_is_removed_by_who_does_the_part(whole: Path, tmp_path: Path) -> None:
    """Part 2 is process 1's of 2: process 0 leaves the file, which might be a living process's, alone."""
    killed(tmp_path, "rename", 5)  # the signals of part 2
    assert len(parts(tmp_path)) == 4 + 1
    assert run_toy(tmp_path, crew=Workers(0, 2)).parts_written == 1
    left = [name for name in parts(tmp_path) if name.endswith(".tmp")]
    assert [name.startswith("signals/group=toy/.part-00002.parquet.") for name in left] == [True]
    run_toy(tmp_path, crew=Workers(1, 2))
    assert parts(tmp_path) == parts(whole)


def test_the_log_survives_a_kill(tmp_path: Path) -> None:
    """Each line of events.jsonl parses; a start without a finish tells what happened."""
    killed(tmp_path, "item", 5)
    run_toy(tmp_path)
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == (
        ["stage_started", "part_written", "stage_started"] + ["part_written"] * 3 + ["stage_finished"]
    )
    assert [event["part"] for event in events if event["event"] == "part_written"] == [0, 1, 2, 3]
    assert [event["parts"] for event in events if event["event"] == "stage_started"] == [4, 3]
    assert len({event["pid"] for event in events}) == 2
    assert events[-1]["statuses"] == {"ok": 10}
