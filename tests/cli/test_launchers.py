"""The scripts in pipelines/launch, run for real: processes, "nodes" and array jobs of this machine's CPU."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from real_runs import EVALUATED, assert_same, finish, started

from cfkv.cli import _guarded

LAUNCH = Path(__file__).resolve().parents[2] / "pipelines" / "launch"
SCRIPTS = sorted(LAUNCH.iterdir())
RECIPE = {
    "trace": {"dataset": "registers", "limit": 4, "max_new_tokens": 384, "part_size": 1},
    "label": [{"kind": "occlusion", "window": 8, "stride": 8, "max_new_tokens": 16}],
    "correlate": {"draws": 100, "smoothings": ["raw"]},
}
ABSENT = {"eviction_kl", "head_agreement", "gate_signals", *EVALUATED}
OWED = "other shards still owe parts of trace, label:occlusion"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RECIPE as YAML."""
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def reference(recipe: Path) -> Path:
    """The recipe run in this process."""
    assert _guarded(["run", str(recipe), str(recipe.parent / "run")]) == 0
    return recipe.parent / "run"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with the `cfkv` and `torchrun` of this Python, as an activated environment has them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("cfkv", "cfkv"), ("torchrun", "torch.distributed.run")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def launch(script: str, *arguments: object, **environment: object) -> subprocess.Popen[str]:
    """Start a script with environment variables of its own."""
    command = ["bash", str(LAUNCH / script), *(str(argument) for argument in arguments)]
    return started(command, **{name: str(value) for name, value in environment.items()})


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def test_all_launchers_are_here() -> None:
    """One node, several nodes, a Slurm array, a model larger than one GPU."""
    names = [path.name for path in SCRIPTS]
    assert names == ["large_model.sh", "one_node.sh", "several_nodes.sh", "slurm_array.sbatch"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_launcher_parses_and_says_how_it_is_used(script: Path) -> None:
    """Without arguments, exit code 2 and one line; the header has an example and tells what follows a kill."""
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).returncode == 0
    header, _, body = script.read_text(encoding="utf-8").partition("set -euo pipefail\n")
    assert f"pipelines/launch/{script.name} RECIPE.yaml RUN" in header
    assert "of a run that nobody killed" in header
    assert "exec " in body
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("programs")
def test_two_nodes_and_one_node_share_a_run(recipe: Path, reference: Path, tmp_path: Path) -> None:
    """Shard 0 is two nodes of one process, shard 1 one node of two; the last one finishes the run."""
    run = tmp_path / "run"
    place = {"NODES": 2, "HEAD": f"localhost:{free_port()}", "PROCESSES": 1}
    nodes = [launch("several_nodes.sh", recipe, run, "--shard", "0/2", **place) for _ in range(2)]
    printed = [finish(node) for node in nodes]
    assert sorted(OWED in text for text in printed) == [False, True]
    assert not (run / "report.html").exists()
    printed = [finish(launch("one_node.sh", recipe, run, "--shard", "1/2", PROCESSES=2))]
    assert OWED not in printed[0]
    assert printed[0].endswith(f"report: {run / 'report.html'}\n")
    assert_same(reference, run, empty=ABSENT)


@pytest.mark.usefixtures("programs")
def test_a_slurm_array_one_task_after_the_other(recipe: Path, reference: Path, tmp_path: Path) -> None:
    """The script lies elsewhere when Slurm runs it; the last task correlates and reports."""
    run, spool = tmp_path / "run", tmp_path / "spool" / "slurm_script"
    spool.parent.mkdir()
    shutil.copy(LAUNCH / "slurm_array.sbatch", spool)
    for task in (1, 0):
        array = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "2"}
        printed = finish(started(["bash", str(spool), str(recipe), str(run)], **array))
        assert (OWED in printed) == (task == 1)
        assert (run / "report.html").exists() == (task == 0)
    assert_same(reference, run, empty=ABSENT)


@pytest.mark.usefixtures("programs")
def test_an_array_that_does_not_start_at_zero_is_refused(recipe: Path, tmp_path: Path) -> None:
    """Tasks 3 and 7 would be shares 3 and 7 of 2."""
    task = launch(
        "slurm_array.sbatch", recipe, tmp_path / "run", SLURM_ARRAY_TASK_ID=3, SLURM_ARRAY_TASK_COUNT=2
    )
    _, complaints = task.communicate(timeout=60)
    assert task.returncode == 2
    assert complaints.startswith("error: --shard '3/2' is not i/n with i below n")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("programs")
def test_a_model_that_is_spread_over_devices(recipe: Path, reference: Path, tmp_path: Path) -> None:
    """On a machine without GPUs, `--device-map auto` puts all layers on the CPU."""
    finish(launch("large_model.sh", recipe, tmp_path / "run"))
    assert_same(reference, tmp_path / "run", empty=ABSENT)
