"""A run's tables as read for checking: parts that cannot be read are told, the others are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from cfkv import store
from cfkv.errors import CfkvError
from cfkv.schemas import TABLES, TRACES, Table
from cfkv.stage import RECORD_KEYS, Run
from cfkv.store import PartState
from cfkv.validate._check import Check


@dataclass
class Content:
    """What could be read of a run, and the checks of the reading itself.

    `raw` holds all rows by (table, partition value); `frame` gives them with each key once. `incomplete` are the
    (table, value) of which a part is missing or unreadable: what they lack is not told again elsewhere.
    """

    path: Path
    stages: Mapping[str, Any]
    raw: dict[tuple[str, str | None], pl.DataFrame]
    incomplete: set[tuple[str, str | None]]
    checks: list[Check] = field(default_factory=list)
    _spans: dict[str, dict[str, Any]] | None = None

    def values(self, table: Table) -> list[str | None]:
        """The partitions of a table that were read."""
        return sorted((value for name, value in self.raw if name == table.name), key=str)

    def frame(self, table: Table, value: str | None = None) -> pl.DataFrame:
        """Rows of a table or one partition, each key once; no rows where there are none."""
        found = self.raw.get((table.name, value))
        if found is None:
            return pl.DataFrame(pl.from_arrow(table.schema.empty_table()))
        return found.unique(table.key, keep="first", maintain_order=True)

    def whole(self, table: Table) -> pl.DataFrame:
        """All partitions of a table."""
        frames = [self.frame(table, value) for value in self.values(table)]
        return pl.concat(frames, how="diagonal") if frames else self.frame(table)

    def has(self, table: Table, value: str | None) -> bool:
        """Whether the run has, or should have, such rows."""
        return (table.name, value) in self.raw or (table.name, value) in self.incomplete

    def settings(self, kind: str) -> Mapping[str, Any]:
        """The recorded configuration of a label kind; empty where there is none."""
        try:
            found = self.stages[f"label:{kind}"]["identity"]["config"]["label"]
        except (KeyError, TypeError):
            return {}
        return found if isinstance(found, Mapping) else {}

    @property
    def lengths(self) -> Mapping[str, Mapping[str, Any]]:
        """Spans and length of each trace whose spans are in order."""
        if self._spans is None:
            names = ("prompt_len", "reasoning_start", "reasoning_stop", "answer_start", "answer_stop")
            rows = self.frame(TRACES).select(
                "trace_id", "status", "correct", *names, length=pl.col("token_ids").list.len()
            )
            self._spans = {row["trace_id"]: row for row in rows.to_dicts() if in_order(row)}
        return self._spans


def in_order(row: Mapping[str, Any]) -> bool:
    """Whether a trace's spans follow each other inside its tokens."""
    places = [0, row["prompt_len"], row["reasoning_start"], row["reasoning_stop"], row["answer_start"]]
    places += [row["answer_stop"], row["length"]]
    return None not in places and all(a <= b for a, b in zip(places, places[1:], strict=False))


def read(path: Path) -> Content:
    """Read all tables of a run.

    Raises
    ------
    CfkvError
        If there is no run.
    """
    if not path.is_dir() or not (
        (path / "run.json").exists() or any((path / name).is_dir() for name in TABLES)
    ):
        raise CfkvError(
            f"{str(path)!r} is no run directory: it should hold run.json and {', '.join(f'{n}/' for n in TABLES)}"
        )
    run = Run(path)
    record = Check("run.json", "the record of the run is whole, and each stage fits what it was made from", 1)
    stages = _stages(run, record)
    present = Check("all tables", "the parts of every recorded stage are there, and no others")
    readable = Check("all tables", "parts open, have a schema version that this cfkv reads, and its columns")
    found: dict[tuple[str, str | None], list[pl.DataFrame]] = {}
    incomplete: set[tuple[str, str | None]] = set()
    owners = _owners(stages)
    for table, value, paths in _places(path, owners):
        place = (table.name, value)
        owner = owners.get(place)
        for index in range(owner["n_parts"] if owner else 0):
            present.seen += 1
            if index not in paths:
                incomplete.add(place)
                where = f"{store.part_path(path, table, value, index).relative_to(path)}"
                present.fail(where, "missing", "a part; run the command of its stage to finish it")
        for index, part in paths.items():
            name = str(part.relative_to(path))
            readable.seen += 1
            content, fault = _part(part, table)
            if content is None:
                incomplete.add(place)
                readable.fail(name, fault[0], fault[1])
                continue
            found.setdefault(place, []).append(content)
            if owner is None:
                present.fail(name, "a part of no recorded stage", "only parts that run.json tells of")
            elif index >= owner["n_parts"]:
                present.fail(name, f"part {index}", f"at most part {owner['n_parts'] - 1}")
            elif store.part_state(path, table, value, index, owner["fingerprint"]) is not PartState.DONE:
                present.fail(
                    name,
                    "another fingerprint in its footer",
                    f"{owner['fingerprint']}, its stage's in run.json",
                )
    raw = {place: pl.concat(frames, how="diagonal") for place, frames in found.items()}
    return Content(path, stages, raw, incomplete, [record, present, readable])


def _stages(run: Run, check: Check) -> Mapping[str, Any]:
    if not run.manifest.path.exists():
        check.fail("run.json", "missing", "the record of every stage that wrote the tables")
        return {}
    try:
        stages = run.manifest.read()["stages"]
    except (CfkvError, OSError, RecursionError) as error:
        check.fail("run.json", error, "a manifest")
        return {}
    whole = {}
    for name, record in stages.items():
        if not isinstance(record, Mapping) or not record.keys() >= RECORD_KEYS:
            check.fail(f"run.json, stage {name}", "an incomplete record", ", ".join(sorted(RECORD_KEYS)))
            continue
        try:
            run.require(name)
        except CfkvError as error:
            check.fail(f"run.json, stage {name}", error, "the fingerprints of what it was made from")
        except (TypeError, AttributeError, KeyError) as error:
            check.fail(f"run.json, stage {name}", repr(error), "a record of this cfkv")
            continue
        if isinstance(record["n_parts"], int) and isinstance(record["outputs"], list):
            whole[name] = record
        else:
            check.fail(f"run.json, stage {name}", "n_parts or outputs of another type", "a number and a list")
    return whole


def _owners(stages: Mapping[str, Any]) -> dict[tuple[str, str | None], Mapping[str, Any]]:
    """The stage that writes each (table, value)."""
    return {
        (output[0], output[1]): record
        for record in stages.values()
        for output in record["outputs"]
        if isinstance(output, list) and len(output) == 2 and output[0] in TABLES
    }


def _places(
    path: Path, owners: Mapping[tuple[str, str | None], Any]
) -> Iterator[tuple[Table, str | None, dict[int, Path]]]:
    """Every (table, value) that is recorded or lies there, with its parts."""
    for table in TABLES.values():
        values: set[str | None] = {value for name, value in owners if name == table.name}
        values |= {None} if table.partition is None else set(store.partition_values(path, table))
        for value in sorted(values, key=str):
            paths = store.part_paths(path, table, value)
            if paths or (table.name, value) in owners:
                yield table, value, paths


def _part(path: Path, table: Table) -> tuple[pl.DataFrame | None, tuple[str, str]]:
    """The rows of a part, or what is wrong with it and what was expected."""
    try:
        content = store.read_part(path, table)
    except (CfkvError, pa.ArrowException, OSError) as error:
        return None, (str(error).replace(f"{path} ", ""), f"a whole part of {table.name}/{table.version}")
    except KeyError as error:
        return None, (f"a version without a migration: {error}", f"{table.name}/{table.version}")
    for column in table.schema:
        if column.name not in content.schema.names:
            return None, (f"no column {column.name}", f"{column.name} ({column.type})")
        kind = content.schema.field(column.name).type
        if kind != column.type:
            return None, (f"{column.name} is {kind}", f"{column.name} is {column.type}")
    for column in content.schema:
        if column.name in table.schema.names:
            continue
        if not table.open_columns:
            return None, (f"an extra column {column.name}", f"the columns of {table.name}/{table.version}")
        if column.type != pa.list_(pa.float32()):
            return None, (f"{column.name} is {column.type}", f"{column.name} is list<float>")
    return pl.DataFrame(pl.from_arrow(content)), ("", "")
