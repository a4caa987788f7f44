"""trace -> label in a run directory with the built-in model: rows, failures, refusals, re-runs, literal = fast."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from cfkv import store
from cfkv.config import Execution, LabelConfig, ModelConfig, Recipe, TraceConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.labels._base import LabelledTrace, LabelTrace
from cfkv.labels.occlusion import Occlusion
from cfkv.models.sources import builtin_folder
from cfkv.schemas import TOKEN_LABELS, TRACES, WINDOWS
from cfkv.session import Session

RECIPE = Recipe(
    trace=TraceConfig(limit=5, part_size=2, max_new_tokens=300, seed=29),
    label=(LabelConfig(window=16, stride=8, max_new_tokens=40),),
)


def session(folder: Path, recipe: Recipe = RECIPE, **execution: object) -> Session:
    return Session.open(folder, recipe, Execution(device="cpu", **execution))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("label") / "run"
    result = session(folder).trace()
    assert result.statuses == {"ok": 5}
    assert (result.parts_written, result.parts_found, result.failed) == (3, 0, 0)
    return folder


@pytest.fixture(scope="module")
def labelled(traced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fast") / "run"
    shutil.copytree(traced, folder)
    result = session(folder, batch_size=5).label("occlusion")
    assert result.failed == 0
    assert set(result.statuses) <= {"labelled", "excluded"}
    assert result.parts_written == 3
    return folder


@pytest.fixture
def fresh(traced: Path, tmp_path: Path) -> Path:
    shutil.copytree(traced, tmp_path / "run")
    return tmp_path / "run"


def windows_of(folder: Path) -> pl.DataFrame:
    return store.scan(folder, WINDOWS).collect().sort("trace_id", "window_index")


def tokens_of(folder: Path) -> pl.DataFrame:
    return store.scan(folder, TOKEN_LABELS).collect().sort("trace_id")


def traces_of(folder: Path) -> pl.DataFrame:
    return store.scan(folder, TRACES).collect().sort("trace_id")


def test_rows_are_those_of_the_correct_traces(labelled: Path) -> None:
    traces, windows, tokens = traces_of(labelled), windows_of(labelled), tokens_of(labelled)
    correct = traces.filter(pl.col("correct"))
    assert len(traces) == 5
    assert len(correct) >= 3
    assert tokens["trace_id"].to_list() == correct["trace_id"].to_list()
    assert tokens.filter(pl.col("status") == "labelled").height >= 3
    assert windows.height == tokens["n_windows"].sum()
    assert windows.unique(["trace_id", "window_index"]).height == windows.height
    for trace, token in zip(correct.iter_rows(named=True), tokens.iter_rows(named=True), strict=True):
        if token["status"] != "labelled":
            continue
        length = trace["reasoning_stop"] - trace["reasoning_start"]
        own = windows.filter(pl.col("trace_id") == trace["trace_id"])
        assert token["n_windows"] == own.height == max(0, -(-(length - 16) // 8)) + 1
        assert token["n_flipped"] == own["flipped"].sum()
        importance = np.array(token["importance"])
        assert importance.shape == (len(trace["token_ids"]),)
        tested = np.flatnonzero(importance >= 0)
        assert tested.tolist() == list(range(trace["reasoning_start"], trace["reasoning_stop"]))
        assert (np.isnan(np.array(token["value"], dtype=float)) == (importance < 0)).all()


def test_literal_run_gives_the_same_tables(labelled: Path, fresh: Path) -> None:
    session(fresh, literal=True).label("occlusion")
    loose = ["delta_nll", "min_margin", "decoded"]
    fast, literal = windows_of(labelled), windows_of(fresh)
    assert fast.drop(loose).equals(literal.drop(loose))
    largest = max(float((fast[name] - literal[name]).abs().max()) for name in loose[:2])
    print(f"{fast.height} windows, {fast['flipped'].sum()} flipped, largest difference {largest:.2e}")
    assert largest < 1e-4
    assert fast["flipped"].sum() > 0
    mine, theirs = tokens_of(labelled), tokens_of(fresh)
    assert mine.drop("value").equals(theirs.drop("value"))
    for first, second in zip(mine["value"], theirs["value"], strict=True):
        np.testing.assert_allclose(first.to_numpy(), second.to_numpy(), atol=1e-4)


def test_running_again_does_nothing(labelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(*arguments: object) -> None:
        raise AssertionError("labelled again")

    before = {path: path.stat().st_mtime_ns for path in labelled.rglob("*.parquet")}
    monkeypatch.setattr(Occlusion, "label", untouched)
    result = session(labelled, memory_gib=0.1, chunk_size=9).label("occlusion")
    assert (result.parts_written, result.parts_found) == (0, 3)
    assert sum(result.statuses.values()) == tokens_of(labelled).height
    assert {path: path.stat().st_mtime_ns for path in labelled.rglob("*.parquet")} == before


def test_lost_part_is_made_again(labelled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(labelled, folder)
    store.part_path(folder, WINDOWS, "occlusion", 1).unlink()
    result = session(folder, batch_size=5).label("occlusion")
    assert (result.parts_written, result.parts_found) == (1, 2)
    assert windows_of(folder).equals(windows_of(labelled))


def test_failures_are_rows(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = traces_of(fresh).filter(pl.col("correct"))["trace_id"].to_list()
    right = Occlusion.label

    def failing(self: Occlusion, trace: LabelTrace) -> LabelledTrace:
        if trace.trace_id == correct[0]:
            raise ItemError("too_long", "it does not fit")
        if trace.trace_id == correct[1]:
            raise torch.OutOfMemoryError("tried to allocate too much\nmore lines")
        return right(self, trace)

    monkeypatch.setattr(Occlusion, "label", failing)
    result = session(fresh).label("occlusion")
    assert result.failed == 2
    assert (result.statuses["too_long"], result.statuses["out_of_memory"]) == (1, 1)
    tokens = {row["trace_id"]: row for row in tokens_of(fresh).iter_rows(named=True)}
    assert tokens[correct[0]]["reason"] == "it does not fit"
    assert tokens[correct[1]]["reason"] == "tried to allocate too much; lower --memory-gib or --chunk-size"
    assert tokens[correct[0]]["importance"] is None
    assert not set(correct[:2]) & set(windows_of(fresh)["trace_id"])
    assert set(correct[2:]) <= set(windows_of(fresh)["trace_id"])


def test_no_correct_trace_is_an_error(tmp_path: Path) -> None:
    capped = RECIPE.model_copy(update={"trace": TraceConfig(limit=3, max_new_tokens=70, seed=29)})
    opened = session(tmp_path / "run", capped)
    assert opened.trace().statuses == {"ok": 3}
    with pytest.raises(
        CfkvError, match=r"none of 3 traces is correct \(3 without failure\).*--max-new-tokens"
    ):
        opened.label("occlusion")


def test_another_model_is_refused(fresh: Path, tmp_path: Path) -> None:
    shutil.copytree(builtin_folder(), tmp_path / "copy")
    other = RECIPE.model_copy(update={"model": ModelConfig(model=str(tmp_path / "copy"))})
    with pytest.raises(CfkvError, match="made by builtin .* not by .*copy"):
        session(fresh, other).label("occlusion")
    assert not (fresh / "windows").exists()


def test_label_needs_traces(tmp_path: Path) -> None:
    with pytest.raises(CfkvError, match="no 'trace' stage yet; run `cfkv trace"):
        session(tmp_path / "run").label("occlusion")


def test_another_window_is_refused_and_replaced_on_request(labelled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(labelled, folder)
    wide = RECIPE.model_copy(update={"label": (LabelConfig(window=32, stride=16, max_new_tokens=40),)})
    with pytest.raises(CfkvError, match=r"window: 16 -> 32"):
        session(folder, wide).label("occlusion")
    result = session(folder, wide, overwrite=True).label("occlusion")
    assert result.parts_written == 3
    assert (windows_of(folder)["stop"] - windows_of(folder)["start"]).max() == 32
