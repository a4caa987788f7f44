"""The tables: locked columns, round trips through parts, keys, refusal of what cannot be read."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cfkv import schemas, store
from cfkv.errors import CfkvError
from cfkv.schemas import SIGNALS, TABLES, TOKEN_LABELS, TRACES, WINDOWS, Table

LOCK = Path(__file__).with_name("schemas.lock.json")
VALUES: dict[str, list[Any]] = {
    "string": ["a", "Ω\n", ""],
    "int8": [-128, 0, 127],
    "int16": [-1, 0, 32767],
    "int32": [-(2**31), 0, 2**31 - 1],
    "int64": [-(2**63), 0, 2**63 - 1],
    "float": [-1.5, 0.0, 2.0**-149],
    "double": [0.1, -0.0, 1e300],
    "bool": [True, False, None],
    "list<int32>": [[1, 2**31 - 1], [], [0]],
    "list<int8>": [[-1, 0, 1], [], [127]],
    "list<float>": [[0.5, -2.0, 3.25], [], [1.0]],
    "list<string>": [["<think>", ""], [], ["Ω"]],
    "list<struct<start: int32, stop: int32>>": [
        [{"start": 3, "stop": 4}],
        [],
        [{"start": 0, "stop": 1}, {"start": 5, "stop": 9}],
    ],
}


def spelling(kind: pa.DataType) -> str:
    """A type's name; independent of how a pyarrow release names the element of a list."""
    return f"list<{spelling(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def declared(table: Table) -> dict[str, Any]:
    """What the lock holds of a table."""
    return {
        "columns": {field.name: spelling(field.type) for field in table.schema},
        "key": list(table.key),
        "partition": table.partition,
        "open_columns": table.open_columns,
        "mantissa_bits": table.mantissa_bits,
    }


def lock_errors(tables: list[Table], lock: dict[str, Any]) -> list[str]:
    """Where the declared tables and the lock disagree. The lock keeps every version that was ever written."""
    errors = []
    for table in tables:
        mark = f"{table.name}/{table.version}"
        if mark not in lock:
            errors.append(f"{mark} is new: add to {LOCK.name} {json.dumps({mark: declared(table)})}")
        elif lock[mark] != declared(table):
            errors.append(f"{mark} changed: raise its version in schemas.py and add a migration")
        older = [int(key.partition("/")[2]) for key in lock if key.startswith(f"{table.name}/")]
        errors += [
            f"{table.name} has no migration from version {version}"
            for version in older
            if version < table.version and (table.name, version) not in schemas.MIGRATIONS
        ]
    known = {table.name for table in tables}
    return [*errors, *(f"{key} is in the lock alone" for key in lock if key.split("/")[0] not in known)]


def rows(table: Table, count: int = 3) -> list[dict[str, Any]]:
    """Rows that cover the values of each column type; keys are made unique."""
    made = [{f.name: VALUES[spelling(f.type)][i] for f in table.schema} for i in range(count)]
    return [{**row, table.key[0]: f"k{i}"} for i, row in enumerate(made)]


def part(run: Path, table: Table, content: pa.Table) -> Path:
    value = None if table.partition is None else "x"
    return store.write_part(run, table, value, 0, content, "f00d")


def test_tables_match_the_lock() -> None:
    assert lock_errors(list(TABLES.values()), json.loads(LOCK.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": TRACES.schema.remove(0)}, "traces/1 changed: raise its version"),
        ({"schema": TRACES.schema.set(3, pa.field("sample_index", pa.int64()))}, "traces/1 changed"),
        ({"key": ("trace_id", "dataset")}, "traces/1 changed"),
        ({"mantissa_bits": 12}, "traces/1 changed"),
        ({"version": 2}, "traces/2 is new"),
    ],
)
def test_the_lock_notices_a_change(change: dict[str, Any], message: str) -> None:
    lock = {"traces/1": declared(TRACES)}
    assert lock_errors([TRACES], lock) == []
    assert lock_errors([dataclasses.replace(TRACES, **change)], lock)[0].startswith(message)


def test_the_lock_asks_for_a_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A raised version that is in the lock still needs the function that lifts the older one."""
    newer = dataclasses.replace(TRACES, version=2)
    lock = {"traces/1": {}, "traces/2": declared(newer)}
    assert lock_errors([newer], lock) == ["traces has no migration from version 1"]
    monkeypatch.setitem(schemas.MIGRATIONS, ("traces", 1), lambda content: content)
    assert lock_errors([newer], lock) == []


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_key_and_partition_are_sound(table: Table) -> None:
    """Key columns exist; a partition is a key column too, or a column that no row needs."""
    assert table.key
    assert set(table.key) <= set(table.schema.names)
    assert table.name.isidentifier()
    if table.partition in table.schema.names:
        assert table.partition in table.key


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_round_trip(table: Table, tmp_path: Path) -> None:
    """What was written is read back, in order, with the declared types (all values are exact at 16 bits)."""
    written = rows(table)
    path = part(tmp_path, table, store.to_arrow(table, written))
    read = store.read_part(path, table)
    assert read.schema.remove_metadata() == table.schema
    assert read.to_pylist() == written


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_missing_columns_are_null(table: Table, tmp_path: Path) -> None:
    """A failure row carries its key and its reason only."""
    row = {name: rows(table)[0][name] for name in table.key}
    read = store.read_part(part(tmp_path, table, store.to_arrow(table, [row])), table).to_pylist()
    assert read == [{**dict.fromkeys(table.schema.names), **row}]


def test_empty_table_keeps_its_columns(tmp_path: Path) -> None:
    read = store.read_part(part(tmp_path, WINDOWS, store.to_arrow(WINDOWS, [])), WINDOWS)
    assert (read.num_rows, read.schema.names) == (0, WINDOWS.schema.names)


def test_registry_columns_round_trip(tmp_path: Path) -> None:
    """An open table takes declared extra columns, and its float lists are rounded to 16 bits."""
    extra = pa.schema([pa.field("norm", pa.list_(pa.float32()), metadata={"unit": "1"})])
    # 1 + 2^-20 is 1 at 16 mantissa bits; 1 + 2^-16 is kept.
    row = {"trace_id": "t", "layer": -1, "kv_head": -1, "norm": [1 + 2.0**-20, 1 + 2.0**-16, -3.0]}
    read = store.read_part(part(tmp_path, SIGNALS, store.to_arrow(SIGNALS, [row], extra)), SIGNALS)
    assert read["norm"].to_pylist() == [[1.0, 1 + 2.0**-16, -3.0]]
    assert read.schema.field("norm").metadata[b"unit"] == b"1"


def test_other_tables_are_exact(tmp_path: Path) -> None:
    row = {"trace_id": "t", "kind": "occlusion", "value": [1 + 2.0**-23]}
    read = store.read_part(part(tmp_path, TOKEN_LABELS, store.to_arrow(TOKEN_LABELS, [row])), TOKEN_LABELS)
    assert read["value"].to_pylist() == [[1 + 2.0**-23]]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_key_that_occurs_twice_is_refused(table: Table) -> None:
    first, second, _ = rows(table)
    twice = {**second, **{name: first[name] for name in table.key}}
    shown = re.escape(repr({name: first[name] for name in table.key}))
    with pytest.raises(CfkvError, match=f"table '{table.name}': the key {shown} occurs twice"):
        store.to_arrow(table, [first, second, twice])
    distinct = {**twice, table.key[-1]: second[table.key[-1]]}
    assert store.to_arrow(table, [first, distinct]).num_rows == 2


def test_undeclared_columns_are_refused() -> None:
    with pytest.raises(CfkvError, match=r"no columns \['anser', 'x'\]; declare them in schemas.py"):
        store.to_arrow(TRACES, [{"trace_id": "t", "anser": "1"}, {"trace_id": "u", "x": 1}])
    extra = pa.schema([pa.field("x", pa.int32())])
    with pytest.raises(CfkvError, match=r"table 'traces' takes no columns beyond its schema: \['x'\]"):
        store.to_arrow(TRACES, [], extra)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """Neither read nor overwritten: the message says which version, what is read, what to do."""
    path = part(tmp_path, TRACES, store.to_arrow(TRACES, rows(TRACES)))
    newer = pq.read_table(path).replace_schema_metadata({schemas.SCHEMA_KEY: b"traces/7"})
    pq.write_table(newer, path)
    message = r"part-00000\.parquet has schema version 7 of 'traces'; .* reads up to 1: upgrade cfkv, or use another"
    for attempt in (
        lambda: store.read_part(path, TRACES),
        lambda: store.part_state(tmp_path, TRACES, None, 0, "f00d"),
        lambda: store.scan(tmp_path, TRACES),
    ):
        with pytest.raises(CfkvError, match=message):
            attempt()


@pytest.mark.parametrize(
    ("footer", "seen"),
    [
        ({schemas.SCHEMA_KEY: b"windows/1"}, "windows/1"),
        ({}, "nothing"),
        ({schemas.SCHEMA_KEY: b"traces/x"}, "traces/x"),
    ],
)
def test_a_foreign_file_is_refused(footer: dict[bytes, bytes], seen: str, tmp_path: Path) -> None:
    """A part of another table, a plain Parquet file, a footer without a version."""
    path = store.part_path(tmp_path, TRACES, None, 0)
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(footer), path)
    message = rf"is not a part of the table 'traces' \(its footer says '{seen}'\); move it out of the run"
    with pytest.raises(CfkvError, match=message):
        store.read_part(path, TRACES)
    with pytest.raises(CfkvError, match=message):
        store.part_state(tmp_path, TRACES, None, 0, "f00d")


def test_an_older_part_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions up: each step is applied once, in order; mixed versions scan as one table."""
    first = Table("toy", 1, pa.schema([("id", pa.string())]), key=("id",))
    second_schema = pa.schema([("id", pa.string()), ("size", pa.int32())])
    third = Table("toy", 3, pa.schema([*second_schema, pa.field("twice", pa.int32())]), key=("id",))
    size, twice = pa.array([2], pa.int32()), pa.array([4], pa.int32())
    monkeypatch.setitem(schemas.MIGRATIONS, ("toy", 1), lambda old: old.append_column("size", size))
    monkeypatch.setitem(schemas.MIGRATIONS, ("toy", 2), lambda old: old.append_column("twice", twice))
    path = store.write_part(tmp_path, first, None, 0, store.to_arrow(first, [{"id": "a"}]), "f")
    assert store.read_part(path, third).to_pylist() == [{"id": "a", "size": 2, "twice": 4}]
    new = {"id": "b", "size": 5, "twice": 10}
    store.write_part(tmp_path, third, None, 1, store.to_arrow(third, [new]), "f")
    assert store.scan(tmp_path, third).collect().to_dicts() == [{"id": "a", "size": 2, "twice": 4}, new]


def test_removals_without_pairs_are_read(tmp_path: Path) -> None:
    """Version 1 of eviction_kl had no pairs: its rows get a synergy of null."""
    table = schemas.EVICTION_KL
    old = dataclasses.replace(
        table, version=1, schema=table.schema.remove(table.schema.names.index("synergy"))
    )
    row = {
        "trace_id": "t",
        "kind": "k",
        "scope": "all",
        "step": 9,
        "block_index": 0,
        "blocks": [{"start": 3, "stop": 4}],
        "kl": 0.5,
        "kl_by_offset": [0.25, 0.75],
        "null_kl": 0.0,
    }
    store.write_part(tmp_path, old, "k", 0, store.to_arrow(old, [row]), "f" * 16)
    found = store.scan(tmp_path, table, "k").collect()
    assert found.columns == table.schema.names
    assert found.to_dicts() == [{**row, "synergy": None}]
