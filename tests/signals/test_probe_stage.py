"""trace -> probe in a run directory with the built-in model: rows, values, failures, refusals, re-runs."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch

import cfkv
from cfkv import store
from cfkv.config import Execution, ModelConfig, ProbeConfig, Recipe, TraceConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.models.loading import LoadedModel
from cfkv.models.sources import builtin_folder
from cfkv.schemas import PROBED, SIGNALS, TRACES
from cfkv.session import Session
from cfkv.signals import _stage
from cfkv.signals._base import Signal, signal_kinds
from cfkv.signals._probe import probe

LAYERS = 4
WORDS = "ask 4 <think>"


def session(folder: Path, recipe: Recipe, **execution: object) -> Session:
    return Session.open(folder, recipe, Execution(device="cpu", **execution))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Four imported traces: two good, one wrong, one that fails."""
    path = tmp_path_factory.mktemp("data") / "traces.jsonl"
    box = "\\boxed{ R1=1 }"
    responses = [
        "now we go on %m =6 6 ; </think> " + box,
        "so keep this in mind </think> \\boxed{ R1=2 }",
        "</think> " + box,  # no reasoning
        "let me check it all again %n +2 8 ; and continue it with care </think> " + box,
    ]
    records = [
        {"problem_id": f"p{i}", "prompt": WORDS, "response": text, "answer": "R1=1"}
        for i, text in enumerate(responses)
    ]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return Recipe(trace=TraceConfig(mode="import", path=path, part_size=2))


@pytest.fixture(scope="module")
def probed(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "run"
    opened = session(folder, recipe, chunk_size=5)
    assert opened.trace().statuses == {"ok": 3, "no_reasoning": 1}
    result = opened.probe()
    assert result.statuses == {"ok": 6}  # 3 traces, 2 groups
    assert (result.parts_written, result.parts_found, result.failed) == (4, 0, 0)
    return folder


@pytest.fixture
def fresh(probed: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    shutil.copytree(probed, tmp_path / "run")
    return tmp_path / "run"


def traces_of(folder: Path) -> dict[str, dict[str, object]]:
    rows = store.scan(folder, TRACES).collect().iter_rows(named=True)
    return {row["trace_id"]: row for row in rows if row["status"] == "ok"}


def test_one_row_per_trace_and_layer(probed: Path) -> None:
    traces = traces_of(probed)
    assert sorted(traces) == ["p0/0", "p1/0", "p3/0"]  # the wrong one too
    for group, first in (("hidden", -1), ("kv", 0)):
        rows = store.scan(probed, SIGNALS, group).collect().sort("trace_id", "layer")
        assert rows["layer"].to_list() == list(range(first, LAYERS)) * 3
        assert rows["kv_head"].unique().to_list() == [-1]
        names = [name for name in signal_kinds.names() if signal_kinds.get(name).group == group]
        for row in rows.iter_rows(named=True):
            for name in names:
                if row["layer"] == -1 and not signal_kinds.get(name).embedding:
                    assert row[name] is None
                    continue
                assert len(row[name]) == len(traces[row["trace_id"]]["token_ids"])  # type: ignore[arg-type]
        status = store.scan(probed, PROBED, group).collect().sort("trace_id")
        assert status["trace_id"].to_list() == sorted(traces)
        assert status["n_tokens"].to_list() == [
            len(traces[name]["token_ids"])  # type: ignore[arg-type]
            for name in sorted(traces)
        ]
        assert status["status"].unique().to_list() == ["ok"]


def test_values_are_the_probes_mean_over_heads(probed: Path, builtin: LoadedModel) -> None:
    """To the 16 mantissa bits that are stored: relative error at most 2**-16."""
    largest = 0.0
    for trace_id, trace in traces_of(probed).items():
        members = [signal() for signal in signal_kinds.members()]
        values = probe(builtin, trace["token_ids"], members, chunk_size=512)  # type: ignore[arg-type]
        for (name, layer), heads in values.items():
            group = signal_kinds.get(name).group
            if group not in ("hidden", "kv") or np.isnan(heads).all():
                continue
            rows = store.scan(probed, SIGNALS, group)
            here = rows.filter((pl.col("trace_id") == trace_id) & (pl.col("layer") == layer)).collect()
            found, expected = here[name].item().to_numpy(), heads.mean(axis=0)
            assert (np.isnan(found) == np.isnan(expected)).all()
            error = np.nanmax(np.abs(found - expected) / np.maximum(np.abs(expected), 1e-2))
            largest = max(largest, float(error))
    print(f"largest relative difference: {largest:.2e}")
    assert largest < 2**-16 + 1e-5


def test_units_travel_with_the_columns(probed: Path) -> None:
    schema = pq.read_schema(store.part_path(probed, SIGNALS, "hidden", 0))
    metadata = schema.field("hidden_diff").metadata
    assert metadata[b"unit"] == b"residual-stream L2 norm"
    assert metadata[b"horizon"] == b"0"
    assert b"EpiKV" in metadata[b"source"]


def test_running_again_does_nothing(probed: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(*arguments: object, **options: object) -> None:
        raise AssertionError("probed again")

    monkeypatch.setattr(_stage, "probe", untouched)
    result = session(probed, recipe, chunk_size=64).probe()
    assert (result.parts_written, result.parts_found, result.statuses) == (0, 4, {"ok": 6})


def test_one_group_leaves_the_other_alone(fresh: Path, recipe: Recipe) -> None:
    store.part_path(fresh, SIGNALS, "kv", 0).unlink()
    hidden = store.part_path(fresh, SIGNALS, "hidden", 0).stat().st_mtime_ns
    only = recipe.model_copy(update={"probe": ProbeConfig(groups=("kv",))})
    result = session(fresh, only).probe()
    assert (result.parts_written, result.parts_found) == (1, 1)
    assert store.part_path(fresh, SIGNALS, "hidden", 0).stat().st_mtime_ns == hidden


def test_groups_that_a_part_lacks_share_one_pass(
    fresh: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part 0 lacks kv, both lack logits and position: each trace is forwarded once, with the signals it lacks."""
    store.part_path(fresh, SIGNALS, "kv", 0).unlink()
    right, asked = _stage.probe, []

    def spy(loaded: LoadedModel, ids: list[int], signals: list[Signal], **options: object) -> object:
        asked.append({signal.group for signal in signals})
        return right(loaded, ids, signals, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(_stage, "probe", spy)
    wanted = ProbeConfig(groups=("hidden,kv", "logits,position"))
    result = session(fresh, recipe.model_copy(update={"probe": wanted})).probe()
    assert asked == [{"kv", "logits", "position"}] * 2 + [{"logits", "position"}]
    assert (result.parts_written, result.parts_found, result.statuses) == (5, 3, {"ok": 12})


def test_signals_without_layers_have_a_null_layer(fresh: Path, recipe: Recipe) -> None:
    wanted = ProbeConfig(groups=("logits", "position"))
    session(fresh, recipe.model_copy(update={"probe": wanted})).probe()
    rows = store.scan(fresh, SIGNALS, "logits").collect()
    assert rows.select("layer", "kv_head").unique().rows() == [(None, -1)]
    assert rows["trace_id"].to_list() == sorted(traces_of(fresh))
    loaded = cfkv.load(fresh)
    traces = traces_of(fresh)
    tidy = loaded.signal("surprisal")
    assert tidy["layer"].null_count() == len(tidy) == sum(len(t["token_ids"]) for t in traces.values())  # type: ignore[arg-type]
    for trace_id, trace in traces.items():
        own = loaded.signal("reasoning_position").filter(trace_id=trace_id)["value"].to_numpy()
        assert own[trace["reasoning_start"]] == 0  # type: ignore[call-overload]
        assert own[trace["reasoning_stop"]] == 1  # type: ignore[call-overload]


def test_heads_are_kept_on_request(fresh: Path, recipe: Recipe, builtin: LoadedModel) -> None:
    """Mean first, then head after head; the setting is part of a group's configuration only where heads exist."""
    wanted = recipe.model_copy(update={"probe": ProbeConfig(per_head=True)})
    with pytest.raises(CfkvError, match="config.per_head: False -> True"):
        session(fresh, wanted).probe()
    result = session(fresh, wanted, overwrite=True).probe()
    assert (result.parts_written, result.parts_found) == (2, 2)  # hidden has no heads and stays
    rows = store.scan(fresh, SIGNALS, "kv").filter(pl.col("trace_id") == "p0/0").collect()
    assert rows["kv_head"].to_list() == [-1] * LAYERS + [0] * LAYERS + [1] * LAYERS
    assert rows["cross_head_key_variance"].null_count() == 2 * LAYERS
    heads = np.array(rows["key_norm"].to_list()).reshape(3, LAYERS, -1)
    assert np.allclose(heads[0], heads[1:].mean(axis=0), rtol=2**-15)
    assert rows.height == 3 * LAYERS


def test_a_part_is_written_while_the_next_one_runs(
    fresh: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write waits for the second part's first forward: it would never end if they took turns."""
    shutil.rmtree(fresh / "probed")
    written, reached = store.write_part, threading.Event()
    right = _stage.probe

    def slow(*arguments: object, **options: object) -> object:
        assert reached.wait(timeout=30) or arguments[3] == 1
        return written(*arguments, **options)  # type: ignore[arg-type]

    def noting(loaded: LoadedModel, ids: list[int], *rest: object, **options: object) -> object:
        if ids == traces_of(fresh)["p3/0"]["token_ids"]:
            reached.set()
        return right(loaded, ids, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "write_part", slow)
    monkeypatch.setattr(_stage, "probe", noting)
    assert session(fresh, recipe).probe().parts_written == 4


def test_a_write_that_fails_ends_the_stage(
    fresh: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background too."""
    shutil.rmtree(fresh / "probed")

    def full(*arguments: object, **options: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_part", full)
    with pytest.raises(OSError, match="No space left"):
        session(fresh, recipe).probe()


def test_failures_are_rows(fresh: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(fresh / "signals")
    shutil.rmtree(fresh / "probed")
    right, calls = _stage.probe, []

    def failing(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        if len(calls) == 1:
            raise ItemError("broken", "a reason")
        if len(calls) == 2:
            raise torch.OutOfMemoryError("too much\nmore lines")
        return right(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(_stage, "probe", failing)
    only = recipe.model_copy(update={"probe": ProbeConfig(groups=("kv",))})
    result = session(fresh, only).probe()
    assert result.statuses == {"broken": 1, "out_of_memory": 1, "ok": 1}
    assert result.failed == 2
    status = store.scan(fresh, PROBED, "kv").collect().sort("trace_id")
    assert status["reason"].to_list() == ["a reason", "too much; lower --chunk-size", None]
    assert store.scan(fresh, SIGNALS, "kv").collect()["trace_id"].unique().to_list() == ["p3/0"]


def test_refusals(fresh: Path, recipe: Recipe, tmp_path: Path) -> None:
    for groups, message in (
        (("hiden",), "unknown signal group 'hiden': did you mean 'hidden'"),
        ((), "legal: "),
    ):
        wrong = recipe.model_copy(update={"probe": ProbeConfig(groups=groups)})
        with pytest.raises(CfkvError, match=message):
            session(fresh, wrong).probe()
    with pytest.raises(CfkvError, match="no 'trace' stage yet"):
        session(tmp_path / "empty", recipe).probe()
    shutil.copytree(builtin_folder(), tmp_path / "copy")
    other = recipe.model_copy(update={"model": ModelConfig(model=str(tmp_path / "copy"))})
    with pytest.raises(CfkvError, match="made by builtin .* not by .*copy"):
        session(fresh, other).probe()
