"""`cfkv validate`: a sound run passes, and each corruption of it fires the check that is meant for it, and no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from cfkv import schemas, store
from cfkv.cli import _guarded
from cfkv.schemas import CORRELATIONS, EVICTION_KL, PROBED, SIGNALS, TOKEN_LABELS, TRACES, WINDOWS, Table
from cfkv.validate import eviction
from cfkv.validate._content import Content
from cfkv.validate.run import Validation, validate
from cfkv.validate.windows import planned

RECIPE = {
    "trace": {"dataset": "registers", "limit": 4, "max_new_tokens": 384, "part_size": 2},
    "label": [
        {"kind": "occlusion", "window": 8, "stride": 4, "max_new_tokens": 16},
        {"kind": "null", "window": 8, "stride": 4, "max_new_tokens": 16},
        {"kind": "eviction_kl", "every": 80, "block": 8},
    ],
    "correlate": {"draws": 100, "smoothings": ["raw"]},
}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of every stage."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    assert _guarded(["run", str(folder / "small.yaml"), str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def spoil(
    run: Path, table: Table, value: str | None, change: Callable[[list[Row]], None], part: int = 0
) -> None:
    """Rewrite a part with changed rows; its footer stays."""
    path = store.part_path(run, table, value, part)
    content = pq.ParquetFile(path).read()
    rows = content.to_pylist()
    change(rows)
    changed = pa.Table.from_pylist(rows, schema=content.schema)
    pq.write_table(changed.replace_schema_metadata(pq.read_metadata(path).metadata), path)


def wrong(found: Validation) -> set[tuple[str, str]]:
    """Table and name of each check that found something."""
    return {(check.table, check.name) for check in found.checks if check.wrong}


def examples(found: Validation) -> list[str]:
    """Where, seen and expected of every violation that is told."""
    return [f"{v.where}: {v.seen}; {v.expected}" for check in found.checks for v in check.examples]


def first_trace(run: Path, kind: str) -> str:
    """The first labelled trace of part 0."""
    return store.read_part(store.part_path(run, TOKEN_LABELS, kind, 0), TOKEN_LABELS)["trace_id"][0].as_py()


def test_a_sound_run_passes(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything was looked at but pairs, of which there are none; the page says so and the exit code is 0."""
    found = validate(sound)
    assert wrong(found) == set()
    assert {check.name for check in found.checks if not check.seen} == {"synergy is KL(ij) - KL(i) - KL(j)"}
    assert _guarded(["validate", str(sound)]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("sound")
    assert "null windows that flipped by rounding alone" in printed
    assert "labelled" in printed


def test_no_run_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _guarded(["validate", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert _guarded(["validate", str(tmp_path / "nowhere")]) == 2


SPANS = ("windows/kind=occlusion", "windows lie inside the reasoning")
PLANNED = ("windows/kind=occlusion", "each trace has the windows that size and stride plan")
COUNTED = ("token_labels/kind=occlusion", "n_windows and n_flipped are those of the windows")
IMPORTANCE = ("token_labels/kind=occlusion", "importance is OR over the covering windows")
VALUE = ("token_labels/kind=occlusion", "value is the mean over the covering windows or single removals")
LISTS = (
    "token_labels/kind=occlusion",
    "lists have one entry per token, and are silent outside the reasoning",
)
COVERAGE = ("token_labels/kind=occlusion", "every correct trace has a row, and no other")
KEYS = ("all tables", "keys are unique over all parts")
FOLDERS = ("all tables", "rows lie in the folder of their kind or group")
KNOWN = ("all tables", "the trace of every row is in traces")
COMPLETE = ("all tables", "rows that did not fail are complete, and others say why")
TRACE_SPANS = ("traces", "prompt, reasoning and answer follow each other inside the tokens")
TRACE_LISTS = ("traces", "texts and log-probabilities are as many as their tokens")
BLOCKS = (
    "eviction_kl/kind=eviction_kl",
    "steps lie inside the trace, and blocks in the reasoning before them",
)
OFFSETS = ("eviction_kl/kind=eviction_kl", "kl is the mean over its offsets, and no divergence is negative")
REMOVALS = ("token_labels/kind=eviction_kl", "n_windows is the number of removals")
GRADED = ("token_labels/kind=eviction_kl", VALUE[1])
UNTESTED = ("token_labels/kind=eviction_kl", IMPORTANCE[1])
SIGNAL_LISTS = ("signals/group=hidden", "a signal has one value per token")
PROBES = ("probed/group=hidden", "probed traces have signals and their number of tokens")
ESTIMATES = ("correlations", "an estimate lies in its interval, or has a reason why there is none")


def put(index: int, **values: Any) -> Callable[[list[Row]], None]:
    """Set columns of one row."""
    return lambda rows: rows[index].update(values)


def entry(index: int, column: str, place: int, value: Any) -> Callable[[list[Row]], None]:
    """Set one entry of one row's list."""

    def change(rows: list[Row]) -> None:
        rows[index][column][place] = value

    return change


def drop(index: int) -> Callable[[list[Row]], None]:
    """Leave a row out."""
    return lambda rows: rows.__delitem__(index)


def flip(rows: list[Row]) -> None:
    """Say the opposite of the first window."""
    rows[0]["flipped"] = not rows[0]["flipped"]


def shorten(column: str) -> Callable[[list[Row]], None]:
    """Cut the last entry of the first row's list."""
    return lambda rows: rows[0].update({column: rows[0][column][:-1]})


def shift(rows: list[Row]) -> None:
    """Move the first window by one token."""
    rows[0]["start"] += 1


def raise_kl(rows: list[Row]) -> None:
    """Another mean than that of the offsets; the labels then differ from it as well."""
    rows[0]["kl"] += 1.0


def future_block(rows: list[Row]) -> None:
    """A block that reaches past its step."""
    rows[0]["blocks"][0]["stop"] = rows[0]["step"] + 1


CORRUPTIONS: list[tuple[Table, str | None, Callable[[list[Row]], None], set[tuple[str, str]], str]] = [
    (TRACES, None, put(0, reasoning_stop=10_000), {TRACE_SPANS}, "reasoning_stop 10000"),
    (TRACES, None, shorten("logprobs"), {TRACE_LISTS}, "log-probabilities"),
    (TRACES, None, put(0, answer_start=None), {COMPLETE}, "answer_start is null"),
    (TRACES, None, put(1, trace_id="stranger"), {KNOWN, COVERAGE}, "a row of that trace in traces"),
    (WINDOWS, "occlusion", lambda rows: rows[0].update(stop=rows[0]["start"]), {SPANS}, "window 0: ["),
    (WINDOWS, "occlusion", shift, {PLANNED}, "window 0: ["),
    (WINDOWS, "occlusion", drop(0), {PLANNED}, "windows; "),
    (WINDOWS, "occlusion", flip, {COUNTED, IMPORTANCE}, "n_flipped"),
    (
        WINDOWS,
        "occlusion",
        lambda rows: rows[0].update(delta_nll=rows[0]["delta_nll"] + 1e-3),
        {VALUE},
        "value",
    ),
    (WINDOWS, "occlusion", lambda rows: rows.append(rows[0]), {KEYS}, "2 rows; 1 row"),
    (WINDOWS, "occlusion", put(0, kind="knockout"), {FOLDERS}, "kind knockout; kind occlusion"),
    (WINDOWS, "occlusion", put(0, status="failed"), {COMPLETE, IMPORTANCE, VALUE}, "reason None"),
    (TOKEN_LABELS, "occlusion", put(0, n_windows=3), {COUNTED}, "n_windows 3"),
    (TOKEN_LABELS, "occlusion", put(0, n_flipped=77), {COUNTED}, "n_flipped 77"),
    (TOKEN_LABELS, "occlusion", shorten("importance"), {LISTS}, "importances"),
    (TOKEN_LABELS, "occlusion", entry(0, "importance", 0, 1), {LISTS}, "importance 1; -1 outside"),
    (TOKEN_LABELS, "occlusion", entry(0, "value", -1, 0.5), {LISTS}, "value 0.5; NaN outside"),
    (TOKEN_LABELS, "occlusion", put(0, value=None), {COMPLETE}, "value is null"),
    (TOKEN_LABELS, "occlusion", put(0, status="failed"), {COMPLETE}, "status failed, reason None"),
    (TOKEN_LABELS, "eviction_kl", put(0, n_windows=1), {REMOVALS}, "n_windows 1"),
    (EVICTION_KL, "eviction_kl", raise_kl, {OFFSETS, GRADED}, "kl 1"),
    (EVICTION_KL, "eviction_kl", put(0, null_kl=-0.5), {OFFSETS}, "null_kl -0.5; at least 0"),
    (EVICTION_KL, "eviction_kl", put(0, step=9_000), {BLOCKS}, "step 9000"),
    (EVICTION_KL, "eviction_kl", future_block, {BLOCKS}, "1 or 2 blocks inside"),
    (EVICTION_KL, "eviction_kl", put(0, blocks=[]), {BLOCKS}, "blocks []"),
    (SIGNALS, "hidden", shorten("hidden_diff"), {SIGNAL_LISTS}, "hidden_diff, layer -1"),
    (PROBED, "hidden", put(0, n_tokens=1), {PROBES}, "n_tokens 1"),
    (PROBED, "hidden", put(0, status="failed", reason="x"), {PROBES}, "signals, and status failed"),
    (CORRELATIONS, None, put(0, low=2.0), {ESTIMATES}, "low <= estimate <= high"),
]


@pytest.mark.parametrize(("table", "value", "change", "expected", "told"), CORRUPTIONS)
def test_precisely_the_right_check_fires(
    run: Path,
    table: Table,
    value: str | None,
    change: Callable[[list[Row]], None],
    expected: set[tuple[str, str]],
    told: str,
) -> None:
    spoil(run, table, value, change)
    found = validate(run)
    related = {check for check in wrong(found) if not check[0].endswith(("kind=null", "group=kv"))}
    if table is TRACES and expected == {KNOWN, COVERAGE}:
        related = {check for check in related if "eviction_kl" not in check[0]}
    assert related == expected
    assert any(told in example for example in examples(found)), examples(found)
    assert not found.sound


def test_one_label_is_named_with_what_it_should_be(run: Path) -> None:
    """A tested token's importance is turned over; its value is moved by .25."""
    rows = store.read_part(store.part_path(run, TOKEN_LABELS, "occlusion", 0), TOKEN_LABELS).to_pylist()
    at = next(place for place, flag in enumerate(rows[0]["importance"]) if flag >= 0)
    flag, value = rows[0]["importance"][at], rows[0]["value"][at]
    trace = first_trace(run, "occlusion")
    spoil(run, TOKEN_LABELS, "occlusion", entry(0, "importance", at, 1 - flag))
    found = validate(run)
    assert wrong(found) == {IMPORTANCE}
    assert examples(found) == [f"trace {trace}, token {at} (1 tokens differ): importance {1 - flag}; {flag}"]
    spoil(run, TOKEN_LABELS, "occlusion", entry(0, "importance", at, flag))
    spoil(run, TOKEN_LABELS, "occlusion", entry(0, "value", at, value + 0.25))
    found = validate(run)
    assert wrong(found) == {VALUE}
    assert examples(found)[0].startswith(f"trace {trace}, token {at} (1 tokens differ): value ")


def test_a_graded_kind_tests_no_token(run: Path) -> None:
    rows = store.read_part(store.part_path(run, TRACES, None, 0), TRACES).to_pylist()
    trace = first_trace(run, "eviction_kl")
    at = next(row for row in rows if row["trace_id"] == trace)["reasoning_start"]
    spoil(run, TOKEN_LABELS, "eviction_kl", entry(0, "importance", at, 1))
    assert wrong(validate(run)) == {UNTESTED}


def test_a_correct_trace_without_a_row(run: Path) -> None:
    spoil(run, TOKEN_LABELS, "occlusion", drop(0))
    found = validate(run)
    assert wrong(found) == {COUNTED, COVERAGE}
    assert any("windows and no row of labels; a row" in example for example in examples(found))


def test_examples_are_a_handful_and_all_are_counted(run: Path) -> None:
    """Every window of the part is emptied: three are told, the rest is counted."""
    number = len(store.read_part(store.part_path(run, WINDOWS, "occlusion", 0), WINDOWS))
    spoil(run, WINDOWS, "occlusion", lambda rows: [row.update(stop=row["start"]) for row in rows] and None)
    check = next(check for check in validate(run).checks if (check.table, check.name) == SPANS)
    assert (check.wrong, len(check.examples)) == (number, 3)


PRESENT = ("all tables", "the parts of every recorded stage are there, and no others")
READABLE = ("all tables", "parts open, have a schema version that this cfkv reads, and its columns")
RECORD = ("run.json", "the record of the run is whole, and each stage fits what it was made from")


def test_a_missing_part(run: Path) -> None:
    store.part_path(run, WINDOWS, "occlusion", 1).unlink()
    found = validate(run)
    assert wrong(found) == {PRESENT}
    assert examples(found)[0].startswith("windows/kind=occlusion/part-00001.parquet: missing; ")


def test_a_part_too_many_and_one_of_another_configuration(run: Path) -> None:
    paths = store.part_paths(run, PROBED, "hidden")
    shutil.copy(paths[0], paths[0].with_name("part-00007.parquet"))
    found = validate(run)
    assert wrong(found) == {PRESENT, KEYS}  # the copy's rows are those of part 0
    content = store.read_part(paths[1], PROBED)
    store.write_part(run, PROBED, "hidden", 1, content, "another")
    paths[0].with_name("part-00007.parquet").unlink()
    found = validate(run)
    assert wrong(found) == {PRESENT}
    assert "another fingerprint in its footer" in examples(found)[0]


@pytest.mark.parametrize("where", [slice(0, 30), slice(200, 600), slice(-200, None)])
def test_damaged_bytes_are_told_without_a_traceback(
    run: Path, where: slice, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.part_path(run, TOKEN_LABELS, "occlusion", 0)
    data = bytearray(path.read_bytes())
    data[where] = bytes(len(data[where]))
    path.write_bytes(bytes(data))
    code = _guarded(["validate", str(run)])
    printed = capsys.readouterr()
    assert (code, printed.err) == (1, "")
    assert "token_labels/kind=occlusion/part-00000.parquet" in printed.out


@pytest.mark.parametrize("table", [TRACES, WINDOWS, EVICTION_KL, TOKEN_LABELS, SIGNALS, PROBED, CORRELATIONS])
def test_every_table_may_be_torn(run: Path, table: Table) -> None:
    for path in (run / table.name).rglob("part-*.parquet"):
        path.write_bytes(path.read_bytes()[:100])
    assert READABLE in wrong(validate(run))


def rewrite(path: Path, content: pa.Table, metadata: dict[bytes, bytes]) -> None:
    pq.write_table(content.replace_schema_metadata(metadata), path)


@pytest.mark.parametrize("version", [b"windows/99", b"windows/0", b"traces/1", b""])
def test_a_version_that_is_not_read(run: Path, version: bytes) -> None:
    path = store.part_path(run, WINDOWS, "occlusion", 0)
    content = pq.ParquetFile(path).read()
    rewrite(path, content, {**pq.read_metadata(path).metadata, schemas.SCHEMA_KEY: version})
    assert wrong(validate(run)) == {READABLE}


def test_other_columns(run: Path) -> None:
    path = store.part_path(run, WINDOWS, "occlusion", 0)
    content, metadata = pq.ParquetFile(path).read(), pq.read_metadata(path).metadata
    for changed, told in (
        (content.drop_columns(["flipped"]), "no column flipped"),
        (content.append_column("mine", content["start"]), "an extra column mine"),
        (content.set_column(4, "start", content["start"].cast(pa.string())), "start is string"),
    ):
        rewrite(path, changed, metadata)
        found = validate(run)
        assert wrong(found) == {READABLE}
        assert told in examples(found)[0]


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 1, "stages": []}', '{"version": 1, "stages": {"trace": 1}}']
)
def test_a_mangled_manifest(run: Path, text: str) -> None:
    (run / "run.json").write_text(text)
    assert RECORD in wrong(validate(run))


def test_a_stage_made_from_something_older(run: Path) -> None:
    """The trace stage is recorded with another fingerprint: its parts are foreign, what was made of it is stale."""
    text = (run / "run.json").read_text()
    content = json.loads(text)
    content["stages"]["trace"]["fingerprint"] = "0" * 16
    (run / "run.json").write_text(json.dumps(content))
    assert wrong(validate(run)) == {RECORD, PRESENT}


def test_windows_planned_by_hand() -> None:
    """32 every 16: N = 1 and 32 have one, 33 two, 48 two, 3344 has (3344 - 32) / 16 + 1 = 208; the last is clipped."""
    for length, number in ((0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (48, 2), (3344, 208)):
        assert len(planned(5, 5 + length, 32, 16)) == number
    assert planned(5, 38, 32, 16) == [(5, 37), (21, 38)]
    assert planned(0, 9, 2, 5) == [(0, 2), (5, 7)]


def pairs(kls: Sequence[float], synergy: float | None) -> list[Row]:
    """Blocks i = [2, 3) and j = [4, 5) alone and together, at step 8 of one trace."""
    blocks: list[list[Row]] = [[{"start": 2, "stop": 3}], [{"start": 4, "stop": 5}]]
    blocks.append(blocks[0] + blocks[1])
    return [
        {
            "trace_id": "t",
            "kind": "eviction_kl",
            "scope": "all",
            "step": 8,
            "block_index": index,
            "blocks": block,
        }
        | {"kl": kl, "kl_by_offset": [kl], "null_kl": 0.0, "synergy": synergy if index == 2 else None}
        for index, (block, kl) in enumerate(zip(blocks, kls, strict=True))
    ]


@pytest.mark.parametrize(("synergy", "number"), [(0.5, 0), (0.5 + 1e-4, 1), (None, 1)])
def test_synergy_by_hand(tmp_path: Path, synergy: float | None, number: int) -> None:
    """KL(ij) = 1, KL(i) = .25, KL(j) = .25: the synergy is .5."""
    frame = pl.DataFrame(pairs((0.25, 0.25, 1.0), synergy), schema_overrides={"synergy": pl.Float32})
    content = Content(tmp_path, {}, {("eviction_kl", "eviction_kl"): frame}, set())
    check = eviction.synergies(content, "eviction_kl")
    assert (check.seen, check.wrong) == (1, number)
    lonely = Content(tmp_path, {}, {("eviction_kl", "eviction_kl"): frame.tail(1)}, set())
    assert eviction.synergies(lonely, "eviction_kl").seen == 0
