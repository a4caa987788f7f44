"""Parts: the atomic Parquet files that tables are made of.

RUN/<table>/part-00003.parquet or RUN/<table>/<partition>=<value>/part-00003.parquet. A part is written to a
temporary file, synced and renamed; it counts as done only if it opens and its fingerprint matches.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cfkv import schemas
from cfkv.errors import CfkvError
from cfkv.schemas import Table

if TYPE_CHECKING:
    import polars as pl

PART = re.compile(r"part-(\d{5,})\.parquet")
UNFINISHED = re.compile(r"\.part-(\d{5,})\.parquet\..+\.tmp")


class PartState(Enum):
    """What lies where a part should be."""

    MISSING = "missing"
    DONE = "done"
    UNREADABLE = "unreadable"
    OTHER = "written with another fingerprint"


def folder(run: Path, table: Table, value: str | None = None) -> Path:
    """The folder of a table, or of its partition `value`; what a folder's name should not have is percent-encoded."""
    base = run / table.name
    return base if table.partition is None else base / f"{table.partition}={quote(str(value), safe='=,+@()')}"


def part_path(run: Path, table: Table, value: str | None, index: int) -> Path:
    """Where part `index` lies."""
    return folder(run, table, value) / f"part-{index:05d}.parquet"


def part_paths(run: Path, table: Table, value: str | None = None) -> dict[int, Path]:
    """The parts that exist, by index; temporary files are not among them."""
    place = folder(run, table, value)
    found = {}
    for path in place.iterdir() if place.is_dir() else ():
        match = PART.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def partition_values(run: Path, table: Table) -> list[str]:
    """The values of a table's partition that exist in the run, sorted."""
    prefix = f"{table.partition}="
    place = run / table.name
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return sorted(unquote(name.removeprefix(prefix)) for name in names if name.startswith(prefix))


def round_mantissa(values: np.ndarray, bits: int) -> np.ndarray:
    """Round float32 `values` to `bits` significant mantissa bits (of 23), to nearest; NaN and inf are kept."""
    drop = 23 - bits
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((words + np.uint32(1 << (drop - 1))) >> np.uint32(drop)) << np.uint32(drop)
    return np.where(np.isfinite(values), rounded.view(np.float32), values).astype(np.float32)


def to_arrow(table: Table, rows: Sequence[Mapping[str, Any]], extra: pa.Schema | None = None) -> pa.Table:
    """Rows as an Arrow table in the declared schema; `extra` holds the columns that a registry adds.

    Raises
    ------
    CfkvError
        If a key occurs twice, or a row has a column that is not declared.
    """
    if extra is not None and not table.open_columns:
        raise CfkvError(f"table {table.name!r} takes no columns beyond its schema: {extra.names}")
    schema = table.schema if extra is None else pa.schema([*table.schema, *extra])
    unknown = {column for row in rows for column in row} - set(schema.names)
    if unknown:
        raise CfkvError(f"table {table.name!r} has no columns {sorted(unknown)}; declare them in schemas.py")
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if table.mantissa_bits is not None and field.type == pa.list_(pa.float32()):
            values = [
                None if value is None else round_mantissa(np.asarray(value, np.float32), table.mantissa_bits)
                for value in values
            ]
        columns.append(pa.array(values, type=field.type))
    keys = [tuple(row.get(name) for name in table.key) for row in rows]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CfkvError(
            f"table {table.name!r}: the key {dict(zip(table.key, twice, strict=True))} occurs twice"
        )
    return pa.Table.from_arrays(columns, schema=schema)


def write_part(
    run: Path, table: Table, value: str | None, index: int, content: pa.Table, fingerprint: str
) -> Path:
    """Write one part atomically: temporary file, fsync, rename, fsync of the folder."""
    path = part_path(run, table, value, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content.replace_schema_metadata(schemas.stamp(table, fingerprint))
    # Processes on two nodes may have one number.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        _write_synced(temporary, content)
        try:
            temporary.replace(path)
        except FileNotFoundError:  # another process does the same part and took it for a leftover
            _write_synced(temporary, content)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def _write_synced(path: Path, content: pa.Table) -> None:
    """Write a Parquet file and wait until it is on the disk.

    Without rows it has no row group: `datasets.load_dataset` ends at an empty one.
    """
    floats = [f"{f.name}.list.element" for f in content.schema if f.type == pa.list_(pa.float32())]
    texts = [f.name for f in content.schema if pa.types.is_string(f.type)]
    with path.open("wb") as file:
        with pq.ParquetWriter(
            file,
            content.schema,
            compression="zstd",
            use_dictionary=texts,
            use_byte_stream_split=floats,
        ) as writer:
            if len(content):
                writer.write_table(content)
        file.flush()
        os.fsync(file.fileno())


def remove_unfinished(run: Path, table: Table, value: str | None, parts: Collection[int]) -> None:
    """Remove the temporary files that killed processes left of `parts`.

    A process that is alive and writes one of them, because it was started twice, writes it again.
    """
    place = folder(run, table, value)
    for path in list(place.iterdir()) if place.is_dir() else ():
        match = UNFINISHED.fullmatch(path.name)
        if match and int(match[1]) in parts:
            path.unlink(missing_ok=True)


def footer(path: Path, table: Table) -> dict[bytes, bytes]:
    """A part's footer metadata, after its version was checked.

    Raises
    ------
    CfkvError
        If the file is truncated or is no part of `table`, or has a newer schema.
    """
    try:
        metadata = pq.read_metadata(path).metadata
    except (pa.ArrowInvalid, OSError) as error:
        raise CfkvError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); re-run the stage that writes "
            f"{table.name!r}: it rewrites unreadable parts and keeps the others"
        ) from error
    schemas.check_version(table, metadata, str(path))
    return metadata or {}


def part_state(run: Path, table: Table, value: str | None, index: int, fingerprint: str) -> PartState:
    """Whether a part is done; a newer schema raises, since it must not be overwritten."""
    path = part_path(run, table, value, index)
    if not path.exists():
        return PartState.MISSING
    try:
        metadata = pq.read_metadata(path).metadata
    except (pa.ArrowInvalid, OSError):
        return PartState.UNREADABLE
    schemas.check_version(table, metadata, str(path))
    same = (metadata or {}).get(schemas.FINGERPRINT_KEY) == fingerprint.encode()
    return PartState.DONE if same else PartState.OTHER


def read_part(path: Path, table: Table, columns: Sequence[str] | None = None) -> pa.Table:
    """One part, lifted to the current schema version."""
    version = schemas.check_version(table, footer(path, table), str(path))
    try:
        content = pq.ParquetFile(path).read(columns=list(columns) if columns else None)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(path) from error
    for old in range(version, table.version):
        content = schemas.MIGRATIONS[table.name, old](content)
    return content


def damaged(path: Path) -> CfkvError:
    """The error for a part whose footer is whole and whose content is not."""
    return CfkvError(
        f"{path} is damaged inside; delete it and run the stage that wrote it again: it redoes that part"
    )


def collect(run: Path, table: Table, value: str | None = None) -> pl.DataFrame:
    """`scan`, read into memory; a damaged part is named."""
    import polars as pl

    try:
        return scan(run, table, value).collect()
    except pl.exceptions.ComputeError as error:
        values = [value] if value is not None or table.partition is None else partition_values(run, table)
        for path in [path for found in values for path in part_paths(run, table, found).values()]:
            read_part(path, table)
        raise CfkvError(f"the parts of {table.name!r} in {run} cannot be read together: {error}") from error


def scan(run: Path, table: Table, value: str | None = None) -> pl.LazyFrame:
    """A lazy frame over all parts of a table, or of one partition (`value`), or of all partitions (None).

    An absent table is an empty frame with the declared columns. Where partitions add columns of their own, a row
    is null in those of the others.
    """
    import polars as pl

    if table.open_columns and value is None and (values := partition_values(run, table)):
        return pl.concat([scan(run, table, found) for found in values], how="diagonal")
    if table.partition is not None and value is None:
        paths = [p for v in partition_values(run, table) for p in part_paths(run, table, v).values()]
    else:
        paths = list(part_paths(run, table, value).values())
    if not paths:
        return pl.from_arrow(table.schema.empty_table()).lazy()  # type: ignore[union-attr]
    footers = {path: footer(path, table) for path in paths}
    for place in {path.parent for path in paths}:
        marks = {
            found.get(schemas.FINGERPRINT_KEY) for path, found in footers.items() if path.parent == place
        }
        if len(marks) > 1:
            raise CfkvError(
                f"{place} holds parts of {len(marks)} configurations, as an interrupted --overwrite leaves them; "
                "run that command again to finish it"
            )
    versions = {schemas.check_version(table, found, str(path)) for path, found in footers.items()}
    if versions == {table.version}:
        return pl.scan_parquet(paths, hive_partitioning=False, missing_columns="insert")
    frames = [pl.from_arrow(read_part(path, table)) for path in paths]
    return pl.concat(frames).lazy()  # type: ignore[type-var,union-attr]
