"""Parts: rounding, atomic writes, states, encodings, and scans over what is there."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfkv import store
from cfkv.errors import CfkvError
from cfkv.schemas import CORRELATIONS, SIGNALS, TOKEN_LABELS, TRACES, WINDOWS
from cfkv.store import PartState, round_mantissa

# Rounding up past the largest float32 gives inf, as IEEE rounding does; half of it stays below.
LARGEST = 2.0**127
normal = st.floats(2.0**-126, LARGEST, width=32) | st.floats(-LARGEST, -(2.0**-126), width=32)
any_float = st.floats(-LARGEST, LARGEST, width=32)
precision = st.integers(1, 22)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def labels(count: int) -> pa.Table:
    """Rows with a float list, an int list and texts."""
    rows = [
        {
            "trace_id": f"t{i}",
            "kind": "occlusion",
            "importance": [0, 1] * 50,
            "value": np.random.default_rng(i).random(100, dtype=np.float32),
            "status": "labelled",
        }
        for i in range(count)
    ]
    return store.to_arrow(TOKEN_LABELS, rows)


def write_trace(run: Path, index: int, *names: str, mark: str = "f") -> Path:
    rows = [{"trace_id": name, "status": "ok"} for name in names]
    return store.write_part(run, TRACES, None, index, store.to_arrow(TRACES, rows), mark)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("value", "bits", "rounded"),
    [
        (1.0, 2, 1.0),
        (1.125, 2, 1.25),  # halfway between 1 and 1.25: away from zero
        (-1.125, 2, -1.25),
        (1.1, 2, 1.0),
        (1.2, 2, 1.25),
        (1.9, 2, 2.0),  # carries into the exponent
        (3.2, 2, 3.0),  # steps of .5 between 2 and 4
        (0.0, 12, 0.0),
        (1 + 2.0**-12, 12, 1 + 2.0**-12),
        (1 + 2.0**-14, 12, 1.0),
        (float(np.finfo(np.float32).max), 16, math.inf),
    ],
)
def test_round_mantissa_by_hand(value: float, bits: int, rounded: float) -> None:
    assert round_mantissa(f32(value), bits)[0] == rounded


@settings(deadline=None)
@given(normal, precision)
def test_round_mantissa_error_is_half_a_step(value: float, bits: int) -> None:
    """Relative error <= 2^-(bits+1), and no more than `bits` mantissa bits are left."""
    rounded = float(round_mantissa(f32(value), bits)[0])
    assert abs(rounded - value) <= abs(value) * 2.0 ** -(bits + 1)
    mantissa, _ = math.frexp(rounded)
    assert (mantissa * 2 ** (bits + 1)).is_integer()


@settings(deadline=None)
@given(st.lists(any_float, min_size=1, max_size=20), precision)
def test_round_mantissa_is_idempotent_monotone_and_odd(values: list[float], bits: int) -> None:
    array = f32(*values)
    once = round_mantissa(array, bits)
    np.testing.assert_array_equal(round_mantissa(once, bits), once)
    np.testing.assert_array_equal(round_mantissa(-array, bits), -once)
    assert (np.diff(round_mantissa(np.sort(array), bits)) >= 0).all()
    assert once.dtype == np.float32


def test_round_mantissa_keeps_nan_inf_and_zero_signs() -> None:
    values = f32(math.nan, math.inf, -math.inf, -0.0)
    values = np.append(values, np.array([0xFFFFFFFF], np.uint32).view(np.float32))  # a NaN of all ones
    rounded = round_mantissa(values, 16)
    np.testing.assert_array_equal(rounded, values)
    assert np.signbit(rounded[3])
    strided = np.arange(20, dtype=np.float32)[::3]
    np.testing.assert_array_equal(round_mantissa(strided, 16), strided)


def test_part_lies_where_it_should(tmp_path: Path) -> None:
    assert store.part_path(tmp_path, TRACES, None, 3) == tmp_path / "traces/part-00003.parquet"
    assert store.part_path(tmp_path, WINDOWS, "knockout", 123456) == (
        tmp_path / "windows/kind=knockout/part-123456.parquet"
    )
    assert write_trace(tmp_path, 3, "a") == tmp_path / "traces/part-00003.parquet"


def test_only_parts_are_found(tmp_path: Path) -> None:
    """Sorted by index; temporary and foreign files are ignored, an absent table has none."""
    assert store.part_paths(tmp_path, TRACES) == {}
    for index in (10, 2, 100000):
        write_trace(tmp_path, index, f"t{index}")
    place = tmp_path / "traces"
    for name in (".part-00001.parquet.77.tmp", "part-1.parquet", "part-00003.parquet.bak", "notes.txt"):
        (place / name).write_text("x")
    assert list(store.part_paths(tmp_path, TRACES)) == [2, 10, 100000]
    assert store.scan(tmp_path, TRACES).collect()["trace_id"].to_list() == ["t2", "t10", "t100000"]


@pytest.mark.parametrize("broken", ["write", "sync", "rename"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failed_write_leaves_nothing_new(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, existing: bool
) -> None:
    """No part and no temporary file, or the old part untouched."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    before = write_trace(tmp_path, 0, "old").read_bytes() if existing else None
    owner, name = {
        "write": (pq.ParquetWriter, "write_table"),
        "sync": (store.os, "fsync"),
        "rename": (Path, "replace"),
    }[broken]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="no space left"):
            write_trace(tmp_path, 0, "new")
    files = list((tmp_path / "traces").iterdir())
    assert [path.read_bytes() for path in files] == ([before] if existing else [])
    write_trace(tmp_path, 0, "new")
    assert store.scan(tmp_path, TRACES).collect()["trace_id"].to_list() == ["new"]


def test_a_part_is_whole_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written to another name in the same folder, synced, and only then renamed."""
    steps: list[str] = []
    sync, replace = store.os.fsync, Path.replace

    def record(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any) -> Any:
            if name == "rename":
                assert args[0].parent == args[1].parent
                assert pq.read_metadata(args[0]).num_rows == 1
            steps.append(name)
            return real(*args)

        return spy

    monkeypatch.setattr(store.os, "fsync", record("sync", sync))
    monkeypatch.setattr(Path, "replace", record("rename", replace))
    write_trace(tmp_path, 0, "a")
    assert steps == ["sync", "rename", "sync"]


def test_a_part_whose_file_was_taken_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was started beside this one, for the same part, removes its temporary file as a leftover."""
    replace, calls = Path.replace, list[Path]()

    def robbed(source: Path, target: Path) -> Path:
        calls.append(source)
        if len(calls) == 1:
            store.remove_unfinished(tmp_path, TRACES, None, {0})
            assert not source.exists()
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", robbed)
    path = write_trace(tmp_path, 0, "a")
    assert len(calls) == 2
    assert list((tmp_path / "traces").iterdir()) == [path]
    assert store.scan(tmp_path, TRACES).collect()["trace_id"].to_list() == ["a"]


def test_only_unfinished_files_of_the_parts_named_are_removed(tmp_path: Path) -> None:
    write_trace(tmp_path, 1, "a")
    place = tmp_path / "traces"
    ours = {".part-00001.parquet.77.tmp", ".part-100001.parquet.77-a0b1.tmp"}
    others = {".part-00002.parquet.77.tmp", "part-00001.parquet.77.tmp", ".part-00001.parquet", "x.tmp"}
    for name in ours | others:
        (place / name).write_text("x")
    store.remove_unfinished(tmp_path, TRACES, None, {1, 100001})
    assert {path.name for path in place.iterdir()} == others | {"part-00001.parquet"}
    store.remove_unfinished(tmp_path / "none", TRACES, None, {1})
    assert not (tmp_path / "none").exists()


def test_states_of_a_part(tmp_path: Path) -> None:
    def state(mark: str = "f") -> PartState:
        return store.part_state(tmp_path, TRACES, None, 0, mark)

    assert state() is PartState.MISSING
    path = write_trace(tmp_path, 0, "a")
    assert (state(), state("g")) == (PartState.DONE, PartState.OTHER)
    truncate(path)
    assert state() is PartState.UNREADABLE
    path.write_bytes(b"")
    assert state() is PartState.UNREADABLE


@pytest.mark.parametrize("read", [store.read_part, lambda path, table: store.scan(path.parents[1], table)])
def test_a_truncated_part_is_a_readable_error(read: Callable[..., Any], tmp_path: Path) -> None:
    path = write_trace(tmp_path, 0, "a")
    truncate(path)
    message = r"part-00000\.parquet cannot be read \(.+\); re-run the stage that writes 'traces': it rewrites"
    with pytest.raises(CfkvError, match=message):
        read(path, TRACES)


def test_encodings_are_used(tmp_path: Path) -> None:
    """zstd everywhere; byte-stream-split, no dictionary, on float list elements; a dictionary on texts only."""
    path = store.write_part(tmp_path, TOKEN_LABELS, "occlusion", 0, labels(4), "f")
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    floats = columns["value.list.element"]
    assert "BYTE_STREAM_SPLIT" in floats.encodings
    assert not floats.has_dictionary_page
    assert not columns["importance.list.element"].has_dictionary_page
    assert columns["status"].has_dictionary_page


def test_signal_columns_are_split_too(tmp_path: Path) -> None:
    """A column that a registry added is encoded like the declared ones, and rounding makes it smaller."""
    values = np.random.default_rng(0).standard_normal(20_000, dtype=np.float32)
    extra = pa.schema([pa.field("norm", pa.list_(pa.float32()))])
    row = {"trace_id": "t", "layer": 0, "kv_head": -1, "norm": values}
    path = store.write_part(tmp_path, SIGNALS, "kv", 0, store.to_arrow(SIGNALS, [row], extra), "f")
    column = pq.read_metadata(path).row_group(0).column(3)
    assert column.path_in_schema == "norm.list.element"
    assert "BYTE_STREAM_SPLIT" in column.encodings
    # 16 of 23 mantissa bits: at least 7 of 32 bits compress away.
    assert column.total_compressed_size / values.size < 4 * 25 / 32


def test_footer_carries_version_and_fingerprint(tmp_path: Path) -> None:
    metadata = pq.read_metadata(write_trace(tmp_path, 0, "a", mark="0123")).metadata
    assert metadata[b"cfkv.schema"] == b"traces/1"
    assert metadata[b"cfkv.fingerprint"] == b"0123"


@pytest.mark.parametrize("table", [TRACES, WINDOWS, SIGNALS, CORRELATIONS], ids=lambda table: table.name)
def test_scan_of_an_absent_table_is_empty(table: Any, tmp_path: Path) -> None:
    frame = store.scan(tmp_path, table).collect()
    assert (frame.height, frame.columns) == (0, table.schema.names)


def test_scan_over_partitions(tmp_path: Path) -> None:
    """One partition, or all of them in the order of their names."""
    for kind, index in (("occlusion", 1), ("knockout", 0), ("occlusion", 0)):
        row = {"trace_id": f"t{index}", "kind": kind}
        store.write_part(tmp_path, TOKEN_LABELS, kind, index, store.to_arrow(TOKEN_LABELS, [row]), "f")
    (tmp_path / "token_labels/README").write_text("x")
    assert store.partition_values(tmp_path, TOKEN_LABELS) == ["knockout", "occlusion"]
    both = store.scan(tmp_path, TOKEN_LABELS).select("kind", "trace_id").collect().rows()
    assert both == [("knockout", "t0"), ("occlusion", "t0"), ("occlusion", "t1")]
    assert store.scan(tmp_path, TOKEN_LABELS, "occlusion").collect().height == 2
    assert store.scan(tmp_path, TOKEN_LABELS, "truncation").collect().height == 0


def test_scan_over_groups_with_columns_of_their_own(tmp_path: Path) -> None:
    """Signals of another group are null."""
    for group, name in (("hidden", "drift"), ("kv", "norm")):
        extra = pa.schema([pa.field(name, pa.list_(pa.float32()))])
        row = {"trace_id": "t", "layer": 0, "kv_head": -1, name: [1.0]}
        store.write_part(tmp_path, SIGNALS, group, 0, store.to_arrow(SIGNALS, [row], extra), "f")
    frame = store.scan(tmp_path, SIGNALS).collect()
    assert frame.columns == ["trace_id", "layer", "kv_head", "drift", "norm"]
    assert frame.select("drift", "norm").rows() == [([1.0], None), (None, [1.0])]
    assert store.scan(tmp_path, SIGNALS, "kv").collect().columns == ["trace_id", "layer", "kv_head", "norm"]


def test_a_part_without_rows_has_no_row_group(tmp_path: Path) -> None:
    """`datasets.load_dataset` ends at an empty one; columns and footer are there."""
    path = store.write_part(tmp_path, TRACES, None, 0, TRACES.schema.empty_table(), "mark")
    assert pq.read_metadata(path).num_row_groups == 0
    assert store.part_state(tmp_path, TRACES, None, 0, "mark") is store.PartState.DONE
    assert store.read_part(path, TRACES).schema.names == TRACES.schema.names
    assert store.collect(tmp_path, TRACES).columns == TRACES.schema.names
