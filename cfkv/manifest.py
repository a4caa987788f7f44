"""run.json, config.yaml, events.jsonl and README.md of a run directory."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from cfkv import __version__
from cfkv.config import Config, Recipe, load_recipe
from cfkv.errors import CfkvError

MANIFEST_VERSION = 1
LIBRARIES = (
    "cfkv",
    "torch",
    "transformers",
    "accelerate",
    "polars",
    "pyarrow",
    "scipy",
    "gguf",
)


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that can change a number, without importing them."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class Manifest:
    """The run's record: which stage was run with which configuration, on what.

    Several processes may update it; each update is a locked read, change and atomic replace.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / "run.json"

    def read(self) -> dict[str, Any]:
        """The content of run.json, or an empty record; refuses a newer version."""
        if not self.path.exists():
            return {"version": MANIFEST_VERSION, "stages": {}}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            newer = content["version"] > MANIFEST_VERSION
            if not newer and not isinstance(content["stages"], dict):
                raise TypeError("'stages' is no mapping")
        except (ValueError, KeyError, TypeError) as error:
            raise CfkvError(
                f"{self.path} is not a cfkv manifest ({error!r}); restore it or use another directory"
            ) from error
        if newer:
            raise CfkvError(
                f"{self.path} has version {content['version']}; this cfkv reads up to {MANIFEST_VERSION}: "
                "upgrade cfkv, or use another run directory"
            )
        return content

    def stage(self, name: str) -> dict[str, Any] | None:
        """The record of one stage, or None."""
        return self.read()["stages"].get(name)

    def update_stage(self, name: str, **fields: Any) -> None:
        """Merge `fields` into a stage's record."""
        self.run.mkdir(parents=True, exist_ok=True)
        with FileLock(self.run / ".lock"):
            content = self.read()
            content["cfkv_version"] = __version__
            content["stages"].setdefault(name, {}).update(fields)
            write_text(self.path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def replace_stage(self, name: str, record: Mapping[str, Any]) -> None:
        """Start a stage's record anew."""
        self.run.mkdir(parents=True, exist_ok=True)
        with FileLock(self.run / ".lock"):
            content = self.read()
            content["cfkv_version"] = __version__
            content["stages"][name] = dict(record)
            write_text(self.path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def recipe(self) -> Recipe:
        """What config.yaml says of the run so far; the defaults where it says nothing."""
        path = self.run / "config.yaml"
        if not path.exists():
            return Recipe()
        return load_recipe(path)

    def record_config(self, section: str, config: Config) -> None:
        """Put a stage's resolved configuration into config.yaml (a label joins the list by its kind)."""
        self.run.mkdir(parents=True, exist_ok=True)
        path = self.run / "config.yaml"
        with FileLock(self.run / ".lock"):
            # Read as a recipe first: the file is a person's to edit, and a broken one must not be built upon.
            recipe = self.recipe()
            content = recipe.model_dump(mode="json", include=recipe.model_fields_set)
            data = config.model_dump(mode="json")
            if section == "label":
                others = [entry for entry in content.get("label", []) if entry["kind"] != data["kind"]]
                content["label"] = [*others, data]
            else:
                content[section] = data
            write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))

    def event(self, name: str, **fields: Any) -> None:
        """Append one line to events.jsonl (a single write, so that processes do not mix)."""
        self.run.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"time": now(), "event": name, "pid": os.getpid(), **fields}, ensure_ascii=False)
        descriptor = os.open(self.run / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (line + "\n").encode())
        finally:
            os.close(descriptor)
