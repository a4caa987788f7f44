"""The layers of architecture.md 2 as tests: who may import whom, what stays light, what is never written."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cfkv

PACKAGE = Path(cfkv.__file__).parent
FOUNDATION = frozenset(
    ["errors", "registry", "config", "schemas", "store", "manifest"]
    + ["stage", "workers", "writer", "progress", "answers", "math_match", "kinds", "margins"]
)
# What each layer may import of cfkv besides itself. Layers that are not named (cli, session, plan, doctor,
# listing) put the others together.
MAY_IMPORT = {
    "foundation": frozenset(),
    "models": frozenset({"foundation"}),
    "problems": frozenset({"foundation"}),
    "traces": frozenset({"problems", "models", "foundation"}),
    "labels": frozenset({"models", "traces", "foundation"}),
    "signals": frozenset({"models", "traces", "foundation"}),
    "analysis": frozenset({"foundation"}),
    "policies": frozenset({"foundation"}),
    "evaluation": frozenset({"models", "policies", "traces", "analysis", "foundation"}),
    "report": frozenset({"analysis", "foundation"}),
    "validate": frozenset({"analysis", "foundation"}),
    "loader": frozenset({"foundation"}),
}
TORCH_FREE = frozenset({"foundation", "analysis", "report", "validate", "loader"})
TORCH_FREE_AT_TOP = frozenset({"cli", "listing"})
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(("cfkv", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in SOURCES}


def layer(module: str) -> str:
    """`cfkv.models.compat` -> models; `cfkv.store` -> foundation; `cfkv.cli` -> cli."""
    name = module.split(".")[1] if "." in module else "__init__"
    return "foundation" if name in FOUNDATION else name


def imports(module: str, tree: ast.AST, *, top_only: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each thing that a module imports, wherever the statement stands."""
    for node in ast.iter_child_nodes(tree) if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.removesuffix(".__init__").split(".")
                parents = parents if module.endswith(".__init__") else parents[:-1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in MODULES or f"{full}.__init__" in MODULES else base


def edge_errors(module: str, source: str) -> list[str]:
    """Each import of a module that the picture does not have."""
    tree, own = ast.parse(source), layer(module)
    found = []
    for line, target in imports(module, tree):
        where, package = f"{module}:{line} imports {target}", target.split(".")[0]
        if package == "transformers" and own != "models":
            found.append(f"{where}: only cfkv.models may")
        if package == "torch" and own in TORCH_FREE:
            found.append(f"{where}: {own} must run without torch")
        legal = MAY_IMPORT.get(own)
        if package == "cfkv" != target and legal is not None and layer(target) not in {own, *legal}:
            found.append(f"{where}: {own} may import {sorted(legal) or 'nothing'}")
    if own in TORCH_FREE_AT_TOP:
        heavy = [t for _, t in imports(module, tree, top_only=True) if t.split(".")[0] == "torch"]
        found += [f"{module} imports {target} at its top" for target in heavy]
    return found


def habit_errors(module: str, source: str) -> list[str]:
    """Statements that are not written in this package."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.lineno, "assert: raise CfkvError for users, a precise error otherwise"))
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = {"Exception", "BaseException"}
            if any(c is None or (isinstance(c, ast.Name) and c.id in broad) for c in caught):
                found.append((node.lineno, "bare or broad except"))
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += [(node.value.lineno, "trust_remote_code=True")] * (ast.unparse(node.value) == "True")
    pickles = {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
    found += [(line, "pickle") for line, name in imports(module, tree) if name.split(".")[0] in pickles]
    return [f"{module}:{line} {what}" for line, what in found]


def test_the_package_is_found_whole() -> None:
    """Guards the tests below against passing on nothing."""
    layers = {layer(module) for module in MODULES}
    assert layers >= {*MAY_IMPORT, *TORCH_FREE_AT_TOP}
    assert {f"cfkv.{name}" for name in FOUNDATION} <= set(MODULES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_stay_inside_the_picture(module: str) -> None:
    assert edge_errors(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_house_habits(module: str) -> None:
    """No assert, no broad except, no pickle, no trusted remote code."""
    assert habit_errors(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cfkv.store", "from cfkv.models import compat"),
        ("cfkv.stage", "def f():\n    from cfkv.traces.rows import trace_rows"),
        ("cfkv.registry", "import cfkv.problems"),
        ("cfkv.labels.occlusion", "from cfkv.signals._base import Signal"),
        ("cfkv.labels.occlusion", "from cfkv import signals"),
        ("cfkv.labels.occlusion", "from ..signals import _base"),
        ("cfkv.labels.__init__", "from .. import signals"),
        ("cfkv.signals.key_norm", "import cfkv.labels._windows"),
        ("cfkv.analysis.correlate", "import torch"),
        ("cfkv.analysis.correlate", "from cfkv.traces import rows"),
        ("cfkv.report.bands", "if 1:\n    from torch.nn import functional"),
        ("cfkv.report.bands", "from cfkv.models import loading"),
        ("cfkv.problems.gsm8k", "from cfkv.traces.items import TraceItem"),
        ("cfkv.models.decode", "from cfkv.traces import segment"),
        ("cfkv.traces.write", "from cfkv.labels import _replay"),
        ("cfkv.traces.write", "import transformers.utils"),
        ("cfkv.plan", "from transformers import AutoConfig"),
        ("cfkv.cli", "import torch"),
        ("cfkv.listing", "from torch import Tensor"),
        ("cfkv.loader", "def f():\n    import torch"),
    ],
)
def test_the_checker_sees_a_wrong_edge(module: str, source: str) -> None:
    assert len(edge_errors(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cfkv.manifest", "from cfkv import __version__\nfrom cfkv.config import Config"),
        (
            "cfkv.labels._stage",
            "import torch\nfrom cfkv import store\nfrom cfkv.traces.rows import trace_rows",
        ),
        ("cfkv.labels.occlusion", "from . import _windows\nfrom ..models import decode"),
        ("cfkv.report.html", "from cfkv.analysis.summary import label_counts"),
        ("cfkv.models.compat", "import torch\nfrom transformers import DynamicCache"),
        ("cfkv.listing", "def f():\n    from cfkv.signals._base import signal_kinds"),
    ],
)
def test_the_checker_passes_a_right_edge(module: str, source: str) -> None:
    assert edge_errors(module, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "assert x",
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept Exception:\n    raise",
        "try:\n    f()\nexcept (OSError, BaseException) as e:\n    raise",
        "load(x, trust_remote_code=True)",
        "import pickle",
        "from pickle import load",
    ],
)
def test_the_checker_sees_a_bad_habit(source: str) -> None:
    assert len(habit_errors("cfkv.cli", source)) == 1


def test_importing_does_no_heavy_work(tmp_path: Path) -> None:
    """cfkv, its command line and its loader come without torch, transformers and scipy."""
    code = (
        "import sys, cfkv, cfkv.cli, cfkv.loader\n"
        "print(*sorted({'torch', 'transformers', 'scipy', 'matplotlib'} & set(sys.modules)), 'polars' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")
