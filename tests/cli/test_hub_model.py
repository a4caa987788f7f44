"""A hub id, served from a hub cache laid out by hand, with the network off."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cfkv.models.sources import builtin_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_cached_hub_model_runs_offline(tmp_path: Path) -> None:
    """The resolved commit is the revision in the manifest; the name is kept verbatim."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(builtin_folder(), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "cfkv", "trace", "run", "--model", "someone/tiny", "--limit", "1"]
    command += ["--max-new-tokens", "4", "--dtype", "bfloat16"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    # Four tokens hold no boundary, so the one item fails: exit code 1, and everything is recorded.
    assert done.returncode == 1, done.stderr
    model = json.loads((tmp_path / "run" / "run.json").read_text())["stages"]["trace"]["model"]
    assert (model["name"], model["revision"]) == ("someone/tiny", COMMIT)
    assert (model["dtype"], model["weights"]) == ("bfloat16", "float32")
    missing = [*command[:5], "--model", "someone/else", "--limit", "1"]
    done = subprocess.run(missing, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "model 'someone/else' cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr
