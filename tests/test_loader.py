"""`cfkv.load`: lazy frames, tidy signals, and what it says when there is nothing to load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import cfkv
from cfkv import store
from cfkv.errors import CfkvError
from cfkv.manifest import Manifest
from cfkv.schemas import PROBED, SIGNALS, TABLES, TOKEN_LABELS, TRACES, Table

NAMES = {"hidden": ("drift",), "kv": ("norm", "variance")}


def put(run: Path, table: Table, group: str | None, index: int, *rows: dict[str, object]) -> None:
    extra = None
    if table is SIGNALS:
        extra = pa.schema([pa.field(name, pa.list_(pa.float32())) for name in NAMES[str(group)]])
    store.write_part(run, table, group, index, store.to_arrow(table, rows, extra), "f00d")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two traces of 3 and 2 tokens in two parts; drift on layers -1 and 0, norm on layer 0 only."""
    for index, (name, ids) in enumerate((("a/0", [5, 6, 7]), ("b/0", [8, 9]))):
        put(tmp_path, TRACES, None, index, {"trace_id": name, "token_ids": ids, "status": "ok"})
        put(tmp_path, PROBED, "kv", index, {"trace_id": name, "group": "kv", "n_tokens": len(ids)})
    first, second = {"trace_id": "a/0", "kv_head": -1}, {"trace_id": "b/0", "kv_head": -1}
    put(
        tmp_path,
        SIGNALS,
        "hidden",
        0,
        {**first, "layer": -1, "drift": [float("nan"), 1.5, 2.5]},
        {**first, "layer": 0, "drift": [0.0, 4.0, 8.0]},
    )
    put(tmp_path, SIGNALS, "hidden", 1, {**second, "layer": 0, "drift": [16.0, 32.0]})
    put(tmp_path, SIGNALS, "kv", 0, {**first, "layer": -1}, {**first, "layer": 0, "norm": [1.0, 2.0, 3.0]})
    put(tmp_path, SIGNALS, "kv", 1, {**second, "layer": 0, "norm": [4.0, 5.0]})
    Manifest(tmp_path).update_stage("trace", fingerprint="f00d")
    return tmp_path


def test_attributes_are_lazy_frames_over_all_parts(run: Path) -> None:
    loaded = cfkv.load(str(run))
    assert isinstance(loaded.traces, pl.LazyFrame)
    assert loaded.traces.select("trace_id", "token_ids").collect().rows() == [
        ("a/0", [5, 6, 7]),
        ("b/0", [8, 9]),
    ]
    assert loaded.probed.collect()["n_tokens"].to_list() == [3, 2]
    assert loaded.windows.collect().height == 0
    assert loaded.token_labels.collect().columns == TOKEN_LABELS.schema.names
    assert set(TABLES) <= set(dir(loaded))
    assert repr(loaded) == f"RunTables({str(run)!r})"
    assert loaded.manifest["stages"] == {"trace": {"fingerprint": "f00d"}}


def test_signals_of_all_groups_in_one_frame(run: Path) -> None:
    frame = cfkv.load(run).signals.filter(pl.col("trace_id") == "b/0").collect()
    assert frame.select("drift", "norm", "variance").rows() == [
        ([16.0, 32.0], None, None),
        (None, [4.0, 5.0], None),
    ]


def test_signal_gives_tidy_rows(run: Path) -> None:
    """One row per trace, layer and position; the position is the index into token_ids."""
    rows = cfkv.load(run).signal("drift", layer=0)
    assert rows.columns == ["trace_id", "layer", "kv_head", "position", "value"]
    assert rows.rows() == [
        ("a/0", 0, -1, 0, 0.0),
        ("a/0", 0, -1, 1, 4.0),
        ("a/0", 0, -1, 2, 8.0),
        ("b/0", 0, -1, 0, 16.0),
        ("b/0", 0, -1, 1, 32.0),
    ]


def test_signal_without_a_layer_gives_all_layers(run: Path) -> None:
    """NaN values stay: the first token has no difference to the one before."""
    loaded = cfkv.load(run)
    rows = loaded.signal("drift")
    assert rows["layer"].to_list() == [-1, -1, -1, 0, 0, 0, 0, 0]
    assert rows["value"].is_nan().to_list() == [True] + [False] * 7
    assert loaded.signal("norm")["value"].to_list() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert loaded.signal("variance").rows() == []


def test_a_trace_as_a_matrix(run: Path) -> None:
    """[tokens, layers], columns ascending by layer, a read-only view of the decoded column."""
    loaded = cfkv.load(run)
    values, layers = loaded.signal_matrix("drift", "a/0")
    assert layers == (-1, 0)
    np.testing.assert_array_equal(values, np.array([[np.nan, 0], [1.5, 4], [2.5, 8]], np.float32))
    assert values.dtype == np.float32
    assert not values.flags.owndata
    assert not values.flags.writeable
    assert loaded.signal_matrix("norm", "a/0").layers == (0,)  # its row of the embedding is null
    assert loaded.signal_matrix("norm", "b/0").values.tolist() == [[4.0], [5.0]]
    for name, trace, head in (("norm", "c/0", -1), ("norm", "a/0", 3)):
        with pytest.raises(CfkvError, match=f"no values for trace '{trace}' and kv_head {head}"):
            loaded.signal_matrix(name, trace, kv_head=head)
    with pytest.raises(CfkvError, match="unknown signal 'nrom'"):
        loaded.signal_matrix("nrom", "a/0")


def test_heads_and_signals_without_layers_as_matrices(tmp_path: Path) -> None:
    """Rows of one head are neighbours; a signal that a head lacks is named."""
    rows: list[dict[str, object]] = [
        {"trace_id": "a", "layer": layer, "kv_head": head, "norm": [10.0 * head + layer, 0.5]}
        for head in (-1, 0, 1)
        for layer in (0, 1)
    ]
    for row in rows[:2]:
        row["variance"] = [1.0, 2.0]
    put(tmp_path, SIGNALS, "kv", 0, *rows)
    put(tmp_path, SIGNALS, "hidden", 0, {"trace_id": "a", "layer": None, "kv_head": -1, "drift": [7.0, 8.0]})
    loaded = cfkv.load(tmp_path)
    assert loaded.signal_matrix("norm", "a", kv_head=1).values.tolist() == [[10.0, 11.0], [0.5, 0.5]]
    with pytest.raises(CfkvError, match="no values for trace 'a' and kv_head 1"):
        loaded.signal_matrix("variance", "a", kv_head=1)
    assert loaded.signal_matrix("drift", "a").layers == (None,)
    assert loaded.signal_matrix("drift", "a").values.tolist() == [[7.0], [8.0]]


def test_signal_groups_are_listed(run: Path) -> None:
    assert cfkv.load(run).signal_groups() == {"hidden": ["drift"], "kv": ["norm", "variance"]}


def test_unknown_names(run: Path) -> None:
    loaded = cfkv.load(run)
    with pytest.raises(CfkvError) as caught:
        loaded.signal("nrom")
    assert str(caught.value) == "unknown signal 'nrom': did you mean 'norm'? legal: drift, norm, variance"
    with pytest.raises(CfkvError) as caught:
        loaded.signal("norm", layer=9)
    assert str(caught.value) == "signal 'norm' has no layer 9; its layers: [0]"
    with pytest.raises(AttributeError, match="unknown table 'trace': did you mean 'traces'"):
        _ = loaded.trace
    assert not hasattr(loaded, "_repr_html_")


@pytest.mark.parametrize("kind", ["absent", "empty", "file", "one name below root"])
def test_what_is_no_run_directory(kind: str, tmp_path: Path) -> None:
    """Never taken for a dataset on the hub (nothing here asks the network)."""
    place = Path("/no-such-run") if kind == "one name below root" else tmp_path / "place"
    if kind == "empty":
        place.mkdir()
    if kind == "file":
        place.write_text("x")
    with pytest.raises(CfkvError) as caught:
        cfkv.load(place)
    assert str(caught.value) == (
        f"{str(place)!r} is no run directory: it should be a folder that holds "
        "traces/, windows/, eviction_kl/, token_labels/, signals/, probed/, head_agreement/, gate_signals/, "
        "correlations/, policy_validity/, judged/, validity_summary/, evaluations/, keep_sets/, policy_accuracy/, "
        "policy_comparisons/, lossless_budgets/, offline_online/"
    )


def test_a_name_of_the_hub_is_downloaded(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """org/name that is no local folder, as a dataset; what the hub refuses is said in one line."""
    import huggingface_hub

    asked: list[tuple[str, str]] = []

    def download(name: str, *, repo_type: str) -> str:
        asked.append((name, repo_type))
        if name == "org/none":
            raise OSError("404: no such dataset\nat some long url")
        return str(run)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert cfkv.load("org/name").path == run
    with pytest.raises(CfkvError) as caught:
        cfkv.load("org/none")
    assert str(caught.value) == (
        "'org/none' is no local run directory, and the hub gave: 404: no such dataset"
    )
    assert asked == [("org/name", "dataset"), ("org/none", "dataset")]


def test_cfkv_has_only_what_it_says() -> None:
    with pytest.raises(AttributeError, match="module 'cfkv' has no attribute 'laod'"):
        _ = cfkv.laod
    assert cfkv.RunTables.__name__ == "RunTables"
