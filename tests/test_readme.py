"""The README says what is there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import yaml

from cfkv.cli import app, quickstart_recipe
from cfkv.config import load_recipe

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_tables_are_current() -> None:
    """Run `python pipelines/readme_tables.py` after adding a member to a family."""
    rewritten = runpy.run_path(str(ROOT / "pipelines" / "readme_tables.py"))["rewritten"]
    assert rewritten(README) == README


def test_every_command_and_flag_of_the_readme_exists() -> None:
    """A line that starts with `cfkv COMMAND` names a command, and its flags are the command's."""
    lines = re.findall(r"^cfkv .*$", README, flags=re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        _, command, *rest = line.partition("#")[0].split()
        known = app[command]
        while rest and rest[0] in set(known):
            known = known[rest.pop(0)]
        names = {name for argument in known.assemble_argument_collection() for name in argument.names}
        for word in rest:
            if word.startswith("--"):
                assert word in names, line


def test_the_quickstart_recipe_is_the_one_in_pipelines() -> None:
    """`cfkv quickstart` and `cfkv run pipelines/quickstart.yaml` are the same experiment."""
    assert load_recipe(ROOT / "pipelines" / "quickstart.yaml") == quickstart_recipe()


def test_every_recipe_in_pipelines_is_valid() -> None:
    """All YAML files under pipelines/ parse as recipes."""
    recipes = sorted((ROOT / "pipelines").glob("*.yaml"))
    assert len(recipes) >= 2
    for path in recipes:
        load_recipe(path)


def test_citation_has_what_a_citation_needs() -> None:
    """The version agrees with the package's."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{citation["version"]}"' in project
    assert {"cff-version", "title", "authors", "message"} <= set(citation)
