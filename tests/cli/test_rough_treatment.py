"""What a hostile tester found: each is now one message, or cannot happen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import cfkv
from cfkv.cli import _guarded
from cfkv.models.sources import builtin_folder

Cfkv = Callable[..., tuple[int, str]]
TRACE = ("--limit", "4", "--max-new-tokens", "384", "--part-size", "2")
LABEL = ("--window", "16", "--stride", "16", "--max-new-tokens", "16")


@pytest.fixture
def run_cfkv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cfkv:
    """Run the command line in tmp_path; returns the exit code and everything printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = _guarded([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_one_table_never_mixes_precisions(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """An interrupted bfloat16 labelling is not finished in float32."""
    run_cfkv("trace", "d", *TRACE)
    assert run_cfkv("label", "d", *LABEL, "--dtype", "bfloat16")[0] == 0
    (tmp_path / "d" / "token_labels" / "kind=occlusion" / "part-00001.parquet").unlink()
    code, printed = run_cfkv("label", "d", *LABEL, "--dtype", "float32")
    assert code == 2
    assert "config.model.dtype: 'bfloat16' -> 'float32'" in printed


def test_a_checkpoint_with_missing_tensors_is_refused(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """They would be drawn at random, anew at every start."""
    shutil.copytree(builtin_folder(), tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["model.layers.2.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    code, printed = run_cfkv("trace", "d", "--model", "m", *TRACE)
    assert code == 2
    assert "no fitting weights for 1 tensors (first: model.layers.2.self_attn.q_proj.weight)" in printed
    (tmp_path / "m" / "model.safetensors").write_bytes(b"cut")
    code, printed = run_cfkv("trace", "d", "--model", "m", *TRACE)
    assert (code, "Traceback" in printed) == (2, False)
    assert "model 'm' cannot be loaded" in printed


def test_damage_inside_a_part_is_named(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """The footer is whole, so that the part counts as done; whoever reads it says which file to delete."""
    for arguments in (("trace", "d", *TRACE), ("label", "d", *LABEL), ("probe", "d"), ("correlate", "d")):
        assert run_cfkv(*arguments)[0] == 0
    part = tmp_path / "d" / "signals" / "group=hidden" / "part-00001.parquet"
    content = bytearray(part.read_bytes())
    content[100:2000:7] = bytes(255 - byte for byte in content[100:2000:7])
    part.write_bytes(content)
    code, printed = run_cfkv("correlate", "d", "--draws", "150", "--overwrite")
    assert code == 2
    assert f"{part.relative_to(tmp_path)} is damaged inside; delete it" in printed
    part.unlink()
    assert run_cfkv("probe", "d")[0] == 0
    assert run_cfkv("correlate", "d", "--draws", "150")[0] == 0


def test_a_report_needs_all_parts(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """A missing correlations or traces part is no smaller study."""
    for arguments in (("trace", "d", *TRACE), ("label", "d", *LABEL), ("probe", "d"), ("correlate", "d")):
        assert run_cfkv(*arguments)[0] == 0
    for place, stage in (("correlations", "correlate"), ("traces", "trace")):
        part = tmp_path / "d" / place / "part-00000.parquet"
        part.rename(tmp_path / "aside")
        code, printed = run_cfkv("report", "d")
        assert code == 2
        assert f"parts of stage '{stage}' are missing" in printed
        (tmp_path / "aside").rename(part)
    assert run_cfkv("report", "d")[0] == 0


def test_a_dry_run_plans_what_was_asked_for(run_cfkv: Cfkv) -> None:
    """Not what happens to lie in the directory."""
    run_cfkv("trace", "d", *TRACE)
    assert "│  <= 7 │" in run_cfkv("trace", "d", "--limit", "7", "--dry-run")[1]
    assert "│     4 │" in run_cfkv("trace", "d", "--dry-run")[1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            '{"question": "q", "answer": "1", "response": "\\ud83d"}',
            "line 1: field 'response' holds half a character",
        ),
        ('{"id": "\\ud83d", "question": "q", "answer": "1", "response": "x"}', "'id' holds half a character"),
        (json.dumps({"question": "q", "answer": "1", "response": "x", "sample_index": 2**40}), "below 2^31"),
        ('{"answer": ' + "1" * 5000 + "}", "line 1 is not valid JSON"),
        ("[" * 100_000, "line 1 is not valid JSON"),
        ('{"id": "", "question": "q", "answer": "1", "response": "x"}', "field 'id' is empty"),
        ('{"id": true, "question": "q", "answer": "1", "response": "x"}', "field 'id' is bool"),
        ('{"question": "q", "answer": null, "response": "x"}', "its fields: question, response"),
    ],
)
def test_lines_that_no_table_can_hold(run_cfkv: Cfkv, tmp_path: Path, line: str, expected: str) -> None:
    """The line and the field are named."""
    (tmp_path / "t.jsonl").write_text(line + "\n")
    code, printed = run_cfkv("trace", "d", "--mode", "import", "--path", "t.jsonl")
    assert code == 2
    assert expected in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("trace", "d", *TRACE, "--device", "banana"), "--device 'banana' is none of auto, cpu, cuda"),
        (("trace", "d", *TRACE, "--device-map", "cuda"), "--device-map 'cuda' is none of auto, balanced"),
        (("doctor", "--device-map", "banana"), "--device-map 'banana' is none of auto, balanced"),
        (("trace", "d", *TRACE, "--attn-implementation", "flash_attention_2"), "cannot be loaded"),
        (("trace", "d", *TRACE, "--attn-implementation", "flex_attention"), "flex_attention needs a GPU"),
        (("trace", "afile/x", *TRACE), "Not a directory: afile/x"),
        (("trace", "d", *TRACE, "--shard", "²/³"), "is not i/n with i below n"),
        (("trace", "d", "--limit", "9" * 20), "limit = "),
        (("trace", "d", "--mode", "import"), "name it with --path FILE.jsonl"),
    ],
)
def test_machines_and_places(
    run_cfkv: Cfkv, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    """Exit code 2 and one message, on a machine without a GPU."""
    (tmp_path / "afile").write_text("")
    code, printed = run_cfkv(*arguments)
    assert (code, "Traceback" in printed) == (2, False)
    assert expected in printed


def test_a_mangled_run_directory(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """config.yaml and run.json are a person's to break."""
    run_cfkv("trace", "d", *TRACE)
    config = tmp_path / "d" / "config.yaml"
    good = config.read_text()
    for text, expected in (
        ("a: [", "is not valid YAML"),
        ("label: {windw: 3}", "unknown key 'label.0.windw'"),
    ):
        config.write_text(text)
        code, printed = run_cfkv("label", "d", *LABEL)
        assert code == 2
        assert expected in printed
    config.write_text(good + "label:\n- window: 8\n")
    assert run_cfkv("label", "d", *LABEL)[0] == 0
    manifest = tmp_path / "d" / "run.json"
    manifest.write_text('{"version": 1, "stages": {"trace": {}}}')
    code, printed = run_cfkv("label", "d")
    assert code == 2
    assert "the record of stage 'trace' lacks some of fingerprint" in printed


def test_a_local_model_is_its_content(
    run_cfkv: Cfkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spelt in another way or seen from another folder, it is the same model, and later stages find it."""
    shutil.copytree(builtin_folder(), tmp_path / "m")
    assert run_cfkv("trace", "d", "--model", "m", *TRACE)[0] == 0
    assert run_cfkv("trace", "d", "--model", str(tmp_path / "m"), *TRACE)[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run_cfkv("label", "../d", *LABEL)[0] == 0
    assert len(cfkv.load(tmp_path / "d").token_labels.collect()) > 0


def test_a_replacement_may_be_a_number(run_cfkv: Cfkv, tmp_path: Path) -> None:
    """In a recipe too, where YAML reads it as one."""
    (tmp_path / "r.yaml").write_text(
        "trace: {limit: 1, max_new_tokens: 384}\nlabel: {replacement: 70, window: 16}\n"
    )
    assert run_cfkv("run", "r.yaml", "d", "--set", "label.max_new_tokens=16")[0] == 0
    assert cfkv.load(tmp_path / "d").windows.collect()["replacement_id"].unique().to_list() == [70]
