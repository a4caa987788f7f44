"""kill -9 at random moments of every stage, with real processes: the same command then ends as if nothing had been.

Two kills per stage by default; `make kills` (the marker `kills`) does twenty and prints how many there were.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from real_runs import assert_same, cfkv_process, finish

from cfkv import store
from cfkv.cli import _guarded
from cfkv.schemas import TABLES

# Four traces in four parts; each command as a person would give it, and the tables that it fills.
COMMANDS = {
    "trace": ("--limit", "4", "--max-new-tokens", "384", "--part-size", "1"),
    "label": ("--window", "8", "--stride", "4", "--max-new-tokens", "16"),
    "probe": (),
    "correlate": ("--draws", "100", "--smoothings", "raw"),
    "report": (),
}
FILLED = {
    "trace": {"traces"},
    "label": {"windows", "token_labels"},
    "probe": {"signals", "probed"},
    "correlate": {"correlations"},
    "report": set(),
}
STAGES = tuple(COMMANDS)
PAGES = ("report.html", "README.md", "figures/*")
POLL = 0.005


@dataclass(frozen=True)
class Whole:
    """An uninterrupted stage: the run before it (None: no directory yet) and after it, and when it got how far."""

    before: Path | None
    after: Path
    steps: list[tuple[float, int]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """All stages in this process, one after the other."""
    folder = tmp_path_factory.mktemp("whole")
    found: dict[str, Whole] = {}
    before = None
    for stage in STAGES:
        run = copied(before, folder / stage)
        with watched(run) as steps:
            assert _guarded([stage, str(run), *COMMANDS[stage]]) == 0
        found[stage] = Whole(before, run, steps)
        before = run
    return found


def copied(before: Path | None, folder: Path) -> Path:
    """A run directory of its own, as it was before a stage."""
    run = folder / "run"
    if before is not None:
        shutil.copytree(before, run)
    return run


def names(run: Path) -> set[str]:
    """Every file of a run."""
    return {str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir()}


def progress(run: Path) -> int:
    """How far a stage has got: finished files, and lines of the log. It only grows."""
    log = run / "events.jsonl"
    lines = log.read_bytes().count(b"\n") if log.exists() else 0
    return lines + sum(not name.endswith(".tmp") for name in names(run))


@contextmanager
def watched(run: Path) -> Iterator[list[tuple[float, int]]]:
    """Note when the run got how far, from the first change on."""
    steps: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        last = progress(run)
        while not stop.wait(POLL):
            now = progress(run)
            if now != last:
                steps.append((time.monotonic(), now))
                last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield steps
    finally:
        stop.set()
        watcher.join()


def kill(stage: str, run: Path, steps: list[tuple[float, int]], part: float) -> bool:
    """Start the stage and SIGKILL it where the uninterrupted one was after `part` of its time.

    That is a while after a step, so that a machine that is slower or faster today changes little. Returns whether
    the process still lived.
    """
    first, last = steps[0][0], steps[-1][0]
    moment = first + part * (last - first)
    since, reached = max(step for step in steps if step[0] <= moment)
    process, pause = cfkv_process(stage, str(run), *COMMANDS[stage]), threading.Event()
    while process.poll() is None and progress(run) < reached:
        pause.wait(POLL)
    pause.wait(moment - since)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode in (0, -signal.SIGKILL)
    return process.returncode == -signal.SIGKILL


def check_what_is_left(run: Path) -> None:
    """Whatever a reader would take for whole is whole: parts, run.json, config.yaml and the log."""
    for table in TABLES.values():
        values = [None] if table.partition is None else store.partition_values(run, table)
        for value in values:
            for path in store.part_paths(run, table, value).values():
                store.read_part(path, table)
    for name, parse in (("run.json", json.loads), ("config.yaml", yaml.safe_load)):
        if (run / name).exists():
            assert parse((run / name).read_text(encoding="utf-8"))
    if (run / "events.jsonl").exists():
        for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
            assert json.loads(line)["event"]


def empty_after(stage: str) -> set[str]:
    """The tables that have no rows after the stage; eviction_kl has none at all."""
    done = STAGES[: STAGES.index(stage) + 1]
    return set(TABLES) - {name for each in done for name in FILLED[each]}


def pages(run: Path) -> dict[str, bytes]:
    """What the report wrote."""
    found = [path for pattern in PAGES for path in run.glob(pattern)]
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


def killed_and_continued(
    stage: str, whole: Whole, folder: Path, kills: int, *, real: bool
) -> tuple[int, int]:
    """Kill the stage `kills` times at moments spread over it; how many processes lived, and had work left.

    The same command then runs to its end, in a process of its own (`real`) or in this one.
    """
    moments = random.Random(f"{stage}, {kills} kills")
    landed = inside = 0
    for turn in range(kills):
        run = copied(whole.before, folder / str(turn))
        landed += kill(stage, run, whole.steps, (turn + moments.random()) / kills)
        check_what_is_left(run)
        inside += not names(run) >= names(whole.after)
        command = (stage, str(run), *COMMANDS[stage])
        if real:
            finish(cfkv_process(*command))
        else:
            assert _guarded(list(command)) == 0
        assert_same(run, whole.after, empty=empty_after(stage))
        assert names(run) == names(whole.after)
        assert pages(run) == pages(whole.after)
    print(
        f"{stage}: {landed} of {kills} kills landed, {inside} on an unfinished stage; every row as in a whole run"
    )
    return landed, inside


@pytest.mark.parametrize("stage", STAGES)
def test_two_kills(stage: str, whole: dict[str, Whole], tmp_path: Path) -> None:
    """One in each half of the stage; the first at least hits it."""
    landed, inside = killed_and_continued(stage, whole[stage], tmp_path, 2, real=False)
    assert landed >= 1
    assert inside >= 1


@pytest.mark.kills
@pytest.mark.parametrize("stage", STAGES)
def test_twenty_kills(stage: str, whole: dict[str, Whole], tmp_path: Path) -> None:
    """One in each twentieth of the stage; the rerun is a process too."""
    landed, inside = killed_and_continued(stage, whole[stage], tmp_path, 20, real=True)
    assert landed >= 15
    assert inside >= 12
