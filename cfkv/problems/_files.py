"""Reading JSONL and Parquet files that people bring, with messages that name the line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cfkv.errors import CfkvError


def needed_path(path: Path | None, name: str) -> Path:
    """The path, or an error that says how to give it."""
    if path is None:
        raise CfkvError(f"dataset {name!r} reads a file; name it with --path FILE.jsonl")
    return path


def read_records(path: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield (number from 0, place for messages, record) of a .jsonl or .parquet file.

    Raises
    ------
    CfkvError
        For a file that is missing or unreadable, or a line that is not a JSON object. Blank lines are skipped.
    """
    if not path.is_file():
        raise CfkvError(f"file {str(path)!r} {'is a folder' if path.is_dir() else 'does not exist'}")
    if path.suffix.lower() == ".parquet":
        yield from _parquet(path)
        return
    if path.suffix.lower() not in {".jsonl", ".json", ".ndjson"}:
        raise CfkvError(f"file {str(path)!r} is neither .jsonl nor .parquet")
    number = 0
    with path.open("rb") as file:
        for line_number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line
            if not line.strip():
                continue
            place = f"{path} line {line_number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise CfkvError(f"{place} is not valid JSON ({error}); mend or remove the line") from error
            if not isinstance(record, dict):
                raise CfkvError(f"{place} is {type(record).__name__}, not a JSON object")
            yield number, place, record
            number += 1


def _parquet(path: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise CfkvError(f"{path} is not a readable Parquet file ({str(error).splitlines()[0]})") from error
    number = 0
    batches = file.iter_batches(batch_size=256)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowInvalid, OSError) as error:
            raise CfkvError(f"{path} is damaged after row {number} ({str(error).splitlines()[0]})") from error
        if batch is None:
            return
        for record in batch.to_pylist():
            yield number, f"{path} row {number + 1}", record
            number += 1


def text_field(record: Mapping[str, Any], names: str | Sequence[str], place: str) -> str:
    """The text under the first of `names` that is present.

    Raises
    ------
    CfkvError
        If none is there, or it is not a string: names the fields that the record has.
    """
    value = optional_text(record, names, place)
    if value is None:
        options = [names] if isinstance(names, str) else list(names)
        wanted = " or ".join(repr(name) for name in options)
        have = ", ".join(sorted(name for name, found in record.items() if found is not None)) or "none"
        raise CfkvError(f"{place} has no field {wanted}; its fields: {have}")
    return value


def optional_text(record: Mapping[str, Any], names: str | Sequence[str], place: str) -> str | None:
    """As `text_field`, but None where the field is absent or null."""
    for name in [names] if isinstance(names, str) else names:
        value = record.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise CfkvError(
                f"{place}: field {name!r} is {type(value).__name__} ({value!r:.60}), not a string"
            )
        return _whole(value, name, place)
    return None


def _whole(text: str, name: str, place: str) -> str:
    """The text, unless it holds half a surrogate pair, which no tokenizer and no file can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CfkvError(
            f"{place}: field {name!r} holds half a character at {error.start} (a lone surrogate); mend the text"
        ) from error
    return text


def answer_field(record: Mapping[str, Any], names: str | Sequence[str], place: str) -> str:
    """As `text_field`; a whole number is taken as its digits, since many files store answers so."""
    for name in [names] if isinstance(names, str) else names:
        value = record.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
    return text_field(record, names, place)


def record_id(record: Mapping[str, Any], number: int, default: str, place: str) -> str:
    """The field `problem_id` or `id` as text (integers are fine), or the default with the row's number."""
    for name in ("problem_id", "id", "unique_id"):
        value = record.get(name)
        if value is not None:
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise CfkvError(f"{place}: field {name!r} is {type(value).__name__}, not a string or integer")
            if value == "":
                raise CfkvError(f"{place}: field {name!r} is empty; give an id, or leave the field out")
            return _whole(str(value), name, place)
    return f"{default}-{number:05d}"
