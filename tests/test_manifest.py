"""run.json, config.yaml and events.jsonl: several writers, refusals, what is recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toy_stage import parts, run_toy

import cfkv
from cfkv.config import LabelConfig, ModelConfig, ProbeConfig, Recipe
from cfkv.errors import CfkvError
from cfkv.manifest import MANIFEST_VERSION, Manifest, library_versions

UPDATES = 25
WRITER = f"""
import sys
from pathlib import Path
from cfkv.manifest import Manifest
manifest, me = Manifest(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for i in range({UPDATES}):
    manifest.update_stage(f"label:{{me}}{{i}}", number=i)
    manifest.update_stage("trace", **{{f"{{me}}{{i}}": i}})
    manifest.event("tick", me=me, i=i, text="Ω" * 3000)
"""


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    """Both start when both are ready; every update and every event of both is there."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, me], cwd=tmp_path, **pipes) for me in "ab"]  # type: ignore[call-overload]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    assert [writer.communicate(timeout=60)[1] for writer in writers] == ["", ""]
    stages = Manifest(tmp_path).read()["stages"]
    expected = {f"{me}{i}": i for me in "ab" for i in range(UPDATES)}
    assert stages.pop("trace") == expected
    assert stages == {f"label:{name}": {"number": i} for name, i in expected.items()}
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ticks = [json.loads(line) for line in lines]
    assert sorted((tick["me"], tick["i"]) for tick in ticks) == [
        (me, i) for me in "ab" for i in range(UPDATES)
    ]
    assert {tick["text"] for tick in ticks} == {"Ω" * 3000}


def test_an_empty_record(tmp_path: Path) -> None:
    """Reading makes no directory."""
    manifest = Manifest(tmp_path / "none")
    assert manifest.read() == {"version": MANIFEST_VERSION, "stages": {}}
    assert manifest.stage("trace") is None
    assert manifest.recipe() == Recipe()
    assert not (tmp_path / "none").exists()


def test_updates_merge_and_replacing_starts_anew(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    manifest.replace_stage("trace", {"fingerprint": "a", "started": "then"})
    manifest.update_stage("trace", finished="now")
    assert manifest.stage("trace") == {"fingerprint": "a", "started": "then", "finished": "now"}
    manifest.replace_stage("trace", {"fingerprint": "b"})
    assert manifest.stage("trace") == {"fingerprint": "b"}
    content = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert (content["version"], content["cfkv_version"]) == (MANIFEST_VERSION, cfkv.__version__)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".tmp") == []


def test_a_newer_manifest_is_refused(tmp_path: Path) -> None:
    """By every stage, before anything is written."""
    run_toy(tmp_path)
    before = parts(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"version": MANIFEST_VERSION + 1, "tables": []}))
    with pytest.raises(CfkvError) as caught:
        run_toy(tmp_path, overwrite=True)
    assert str(caught.value) == (
        f"{tmp_path / 'run.json'} has version 2; this cfkv reads up to 1: upgrade cfkv, or use another run directory"
    )
    assert parts(tmp_path) == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"version": "1", "stages": {}}', b'{"version": 1}', b"\xff\xfe"]
)
def test_what_is_no_manifest_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(
        CfkvError, match=r"run\.json is not a cfkv manifest \(.+\); restore it or use another direct"
    ):
        Manifest(tmp_path).read()


def test_a_failed_update_keeps_the_old_record(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)
    manifest.update_stage("trace", number=1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        manifest.update_stage("trace", number=object())
    assert manifest.stage("trace") == {"number": 1}


def test_config_yaml_grows_section_by_section(tmp_path: Path) -> None:
    """A label joins the list by its kind; what is read back is a recipe."""
    manifest = Manifest(tmp_path)
    manifest.record_config("model", ModelConfig(model="smollm2"))
    manifest.record_config("label", LabelConfig(window=8))
    manifest.record_config("label", LabelConfig(kind="knockout", replacement="Ω"))
    manifest.record_config("label", LabelConfig(window=16))
    manifest.record_config("probe", ProbeConfig(groups=("kv",)))
    recipe = manifest.recipe()
    assert recipe.model.model == "smollm2"
    assert recipe.label == (LabelConfig(kind="knockout", replacement="Ω"), LabelConfig(window=16))
    assert recipe.probe.groups == ("kv",)
    (tmp_path / "config.yaml").write_text("prob: {}\n")
    with pytest.raises(CfkvError, match=r"config\.yaml: unknown key 'prob': did you mean 'probe'"):
        manifest.recipe()


def test_versions_that_can_change_a_number_are_recorded(tmp_path: Path) -> None:
    found = library_versions()
    assert {"python", "cfkv", "torch", "transformers", "polars", "pyarrow"} <= set(found)
    assert found["cfkv"] == cfkv.__version__
    run_toy(tmp_path)
    record = Manifest(tmp_path).stage("probe:toy")
    assert record is not None
    assert record["versions"] == found
