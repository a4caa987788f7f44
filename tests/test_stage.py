"""The driver of all stages: shares, resuming, refusals and counts, on a stage that needs no model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from toy_stage import COLUMNS, OUTPUTS, parts, rows, run_toy, run_traces, toy_stage

from cfkv import stage as driver
from cfkv import store
from cfkv.errors import CfkvError
from cfkv.manifest import Manifest
from cfkv.schemas import PROBED, SIGNALS
from cfkv.stage import Run, StageResult
from cfkv.workers import Workers

NEITHER = "use another run directory, or --overwrite to replace this stage"


def refusal(path: Path, **fields: object) -> str:
    with pytest.raises(CfkvError) as caught:
        run_toy(path, toy_stage(**fields))  # type: ignore[arg-type]
    return str(caught.value)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of the toy stage: parts of 3, 3, 3 and 1 items."""
    run_toy(tmp_path / "run")
    return tmp_path / "run"


def test_the_parts_are_as_planned(run: Path) -> None:
    """10 items in parts of 3, two outputs each."""
    names = [f"part-0000{index}.parquet" for index in range(4)]
    assert list(parts(run)) == [f"{t}/group=toy/{name}" for t in ("probed", "signals") for name in names]
    counts = [
        store.read_part(path, PROBED).num_rows for path in store.part_paths(run, PROBED, "toy").values()
    ]
    assert counts == [3, 3, 3, 1]
    assert store.scan(run, SIGNALS, "toy").collect().row(5, named=True) == {
        "trace_id": "t02",
        "layer": 1,
        "kv_head": -1,
        "toy": [2.0, 1.5],
    }


@pytest.mark.parametrize(("world_size", "shards"), [(2, 1), (3, 1), (1, 2), (1, 5), (2, 3)])
def test_parts_do_not_depend_on_who_writes_them(
    run: Path, world_size: int, shards: int, tmp_path: Path
) -> None:
    """The same files, byte for byte, for any number of processes and shards, in any order."""
    crews = [Workers(r, world_size, s, shards) for s in range(shards) for r in range(world_size)]
    done = [run_toy(tmp_path / "other", crew=crew) for crew in reversed(crews)]
    assert sum(result.parts_written for result in done) == 4
    assert sum(result.statuses["ok"] for result in done) == 10
    assert parts(tmp_path / "other") == parts(run)


def test_a_second_run_does_nothing(run: Path) -> None:
    """No item is processed, no file is touched, and the counts are of the whole."""
    before, calls = parts(run), list[int]()
    again = run_toy(run, on_item=calls.append)
    assert (again.parts_written, again.parts_found, dict(again.statuses)) == (0, 4, {"ok": 10})
    assert (calls, parts(run)) == ([], before)


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.table.name)
def test_only_a_truncated_part_is_redone(output: driver.Output, run: Path) -> None:
    """Part 1 holds items 3, 4 and 5; either of its files being cut is enough."""
    before, calls = parts(run), list[int]()
    path = store.part_path(run, output.table, "toy", 1)
    path.write_bytes(path.read_bytes()[:-9])
    again = run_toy(run, on_item=calls.append)
    assert (calls, again.parts_written, again.parts_found) == ([3, 4, 5], 1, 3)
    assert parts(run) == before


def test_a_part_of_another_fingerprint_is_redone(run: Path) -> None:
    before, calls = parts(run), list[int]()
    content = store.to_arrow(SIGNALS, [{"trace_id": "x"}], COLUMNS)
    store.write_part(run, SIGNALS, "toy", 3, content, "other")
    run_toy(run, on_item=calls.append)
    assert (calls, parts(run)) == ([9], before)


def test_an_exception_keeps_the_parts_that_are_done(run: Path, tmp_path: Path) -> None:
    """It propagates; the next run goes on from there."""

    def fail(item: int) -> None:
        if item == 7:
            raise RuntimeError("disk on fire")

    calls: list[int] = []
    with pytest.raises(RuntimeError, match="disk on fire"):
        run_toy(tmp_path / "other", on_item=fail)
    assert run_toy(tmp_path / "other", on_item=calls.append).parts_found == 2
    assert calls == [6, 7, 8, 9]
    assert parts(tmp_path / "other") == parts(run)


def test_another_configuration_is_refused_with_the_difference(run: Path) -> None:
    """Nothing is written; the same directory still runs as it was."""
    before = parts(run), (run / "run.json").read_bytes()
    assert refusal(run, factor=2.0) == (
        f"{run} holds 'probe:toy' made with another configuration:\n  config.factor: 1.0 -> 2.0\n{NEITHER}"
    )
    assert "\n  config.items: 10 -> 8\n  config.size: 3 -> 4\nuse" in refusal(run, items=8, size=4)
    assert "\n  stage_version: 1 -> 2\nuse" in refusal(run, version=2)
    assert (parts(run), (run / "run.json").read_bytes()) == before
    assert run_toy(run).parts_found == 4


def test_overwrite_replaces(run: Path) -> None:
    """All parts are made anew, and the record says what they were made with; repeating it does nothing."""
    replaced = run_toy(run, toy_stage(factor=2.0), overwrite=True)
    assert replaced.parts_written == 4
    assert store.scan(run, SIGNALS, "toy").collect()["toy"].to_list()[-1] == [18.0, 1.5]
    record = Manifest(run).stage("probe:toy")
    assert record is not None
    assert record["identity"]["config"]["factor"] == 2.0
    assert run_toy(run, toy_stage(factor=2.0), overwrite=True).parts_written == 0


@pytest.mark.parametrize(("items", "size", "left"), [(4, 3, [0, 1]), (10, 10, [0]), (10, 2, [0, 1, 2, 3, 4])])
def test_leftovers_of_a_longer_plan_are_removed(run: Path, items: int, size: int, left: list[int]) -> None:
    run_toy(run, toy_stage(items, size), overwrite=True)
    for output in OUTPUTS:
        assert list(store.part_paths(run, output.table, output.value)) == left
    assert len(rows(run)) == items * 3  # two signal rows and one status row each


def test_parts_without_a_manifest(run: Path) -> None:
    """The footers decide: the same configuration goes on, another one is refused."""
    (run / "run.json").unlink()
    assert refusal(run, factor=2.0) == (
        f"{run / 'signals/group=toy/part-00000.parquet'} was written by another configuration, and run.json does "
        f"not say which; {NEITHER}"
    )
    assert run_toy(run).parts_found == 4


def test_an_upstream_stage_must_be_there(tmp_path: Path) -> None:
    downstream = {"upstream": ("trace",)}
    assert refusal(tmp_path, **downstream) == (
        f"{tmp_path} has no 'trace' stage yet; run `cfkv trace {tmp_path}` first"
    )
    run_traces(tmp_path)
    assert run_toy(tmp_path, toy_stage(**downstream)).parts_written == 4  # type: ignore[arg-type]


def test_an_upstream_change_is_noticed(tmp_path: Path) -> None:
    """The downstream stage is neither continued nor read; --overwrite makes it anew."""
    stage = toy_stage(upstream=("trace",))
    run_traces(tmp_path)
    run_toy(tmp_path, stage)
    run = Run(tmp_path)
    old = run.require("trace")["fingerprint"]
    run_traces(tmp_path, seed=1, overwrite=True)
    new = run.require("trace")["fingerprint"]
    assert old != new
    assert f"\n  upstream.trace: '{old}' -> '{new}'\n" in refusal(tmp_path, upstream=("trace",))
    with pytest.raises(CfkvError) as caught:
        run.require("probe:toy")
    assert str(caught.value) == (
        f"{tmp_path}: stage 'probe:toy' was made from trace {old}, but that stage is now {new}; run "
        f"`cfkv probe {tmp_path} --overwrite`"
    )
    assert run_toy(tmp_path, stage, overwrite=True).parts_written == 4
    assert run.require("probe:toy")["identity"]["upstream"] == {"trace": new}


def test_failures_are_counted_by_status(tmp_path: Path) -> None:
    """Each process counts its own parts, found or written; excluded and skipped items did not fail."""
    ended = {0: "too_long", 3: "out_of_memory", 4: "excluded", 9: "too_long", 5: "skipped"}
    whole = run_toy(tmp_path / "a", statuses=ended)
    assert dict(whole.statuses) == {"ok": 5, "too_long": 2, "out_of_memory": 1, "excluded": 1, "skipped": 1}
    assert whole.failed == 3
    assert run_toy(tmp_path / "a").failed == 3
    assert Run(tmp_path / "a").statuses("probe:toy", [0, 2]) == {"too_long": 1, "ok": 5}
    # Process 1 of 2 has part 1 (items 3, 4, 5) and part 2 (items 6, 7, 8).
    share = run_toy(tmp_path / "b", crew=Workers(1, 2), statuses=ended)
    assert dict(share.statuses) == {"out_of_memory": 1, "excluded": 1, "skipped": 1, "ok": 3}
    assert StageResult("empty").failed == 0


def test_finished_is_recorded_by_whoever_is_last(tmp_path: Path) -> None:
    run_toy(tmp_path, crew=Workers(1, 2))
    record = Manifest(tmp_path).stage("probe:toy")
    assert record is not None
    assert "finished" not in record
    assert Run(tmp_path).missing_parts("probe:toy") == [0, 3]
    run_toy(tmp_path, crew=Workers(0, 2))
    record = Manifest(tmp_path).stage("probe:toy")
    assert record is not None
    assert (record["world_size"], record["n_parts"], record["n_items"]) == (2, 4, 10)
    assert record["finished"] >= record["started"]
    assert Run(tmp_path).missing_parts("probe:toy") == []


def test_waiting_for_parts_that_nobody_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once without patience; with it, when no part came for too long. Parts that are there suffice."""
    run_toy(tmp_path, crew=Workers(1, 2))
    run = Run(tmp_path)
    run.wait_for("probe:toy", parts=[1, 2], patient=False)
    message = (
        f"{tmp_path}: 2 of 4 parts of stage 'probe:toy' are missing .first: 0.; run `cfkv probe {tmp_path}`"
    )
    with pytest.raises(CfkvError, match=message):
        run.wait_for("probe:toy", patient=False)
    monkeypatch.setattr(driver, "STALL_SECONDS", -1.0)
    with pytest.raises(CfkvError, match=message):
        run.wait_for("probe:toy", patient=True)


def test_waiting_ends_when_the_parts_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([[0, 1], [1], []])
    monkeypatch.setattr(driver, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(Run, "missing_parts", lambda *_: next(seen))
    Run(tmp_path).wait_for("probe:toy", patient=True)
    assert list(seen) == []


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(CfkvError, match="x is a file; a run directory is a folder: name another path"):
        Run(tmp_path / "x")


def test_progress_is_one_line_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, from rank 0 only."""
    run_toy(tmp_path / "a")
    assert re.fullmatch(r"probe:toy: 10/10 after \d+ s\n", capsys.readouterr().err)
    run_toy(tmp_path / "b", crew=Workers(1, 2))
    assert capsys.readouterr() == ("", "")
