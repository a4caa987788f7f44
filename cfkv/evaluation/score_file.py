"""`cfkv score FILE.py DIR`: a policy in a file of its own, held against the labels of a run between random and oracle.

The file is what a module of cfkv/policies is: one class with @policy_kinds.register and @parameters. Nothing is
written.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl
from rich.console import Console
from rich.markup import escape

from cfkv.analysis.validity_summary import summarise, validity_tables
from cfkv.config import Execution, OfflineConfig
from cfkv.errors import CfkvError
from cfkv.evaluation._labels import labelled_traces
from cfkv.evaluation._names import Position
from cfkv.evaluation.offline import Judge
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import Policy, make_policy, policy_kinds
from cfkv.progress import Ticker
from cfkv.schemas import POLICY_VALIDITY
from cfkv.stage import Run

PRIVATE = "_cfkv_policy_file"
SIGNIFICANCE = 0.05


class LinesOf:
    """Inside, an error that passes through a line of `path` is told with that line and without cfkv's own."""

    def __init__(self, path: Path) -> None:
        self.path, self.shown = str(path.resolve()), path

    def __enter__(self) -> LinesOf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, SyntaxError) and error.filename == self.path:
            raise self._told(error.lineno or 1, error.msg, error) from None
        lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == self.path]
        if lines:
            text = str(error) if isinstance(error, CfkvError) else f"{type(error).__name__}: {error}"
            raise self._told(lines[-1] or 1, text, error) from None

    def _told(self, number: int, text: str, error: Exception) -> CfkvError:
        line = linecache.getline(self.path, number).strip()
        return CfkvError(f"{self.shown}, line {number}: {line}\n  {text}")


@contextmanager
def policy_file(path: Path) -> Iterator[Policy]:
    """The policy of a file, with its default parameters; its name is the file's stem, while the context lasts.

    Raises
    ------
    CfkvError
        If there is no such file, its name is a built-in policy's, or it does not hold exactly one policy.
    """
    name = path.stem
    if path.suffix != ".py" or not path.is_file():
        raise CfkvError(f"{str(path)!r} is no Python file; name a file such as my_policy.py")
    if name in {*policy_kinds.names(), Position.name}:
        raise CfkvError(
            f"{path} would be called {name!r}, as a policy of cfkv is: rename the file, for instance to my_{name}.py"
        )
    module_name = f"{PRIVATE}.{name}"
    found = importlib.util.spec_from_file_location(module_name, path.resolve())
    if found is None or found.loader is None:
        raise CfkvError(f"{path} cannot be imported as a module")
    linecache.checkcache(str(path.resolve()))
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # dataclasses look their annotations up there
    try:
        with LinesOf(path):
            found.loader.exec_module(module)
        yield _made(path, name)
    finally:
        policy_kinds.withdraw(name)
        del sys.modules[module_name]


def _made(path: Path, name: str) -> Policy:
    how = "one class with @policy_kinds.register above @parameters, as in cfkv/policies/tova.py"
    if name not in policy_kinds.names():
        raise CfkvError(f"{path} registers no policy; it needs {how}")
    kind = policy_kinds.get(name)
    if not issubclass(kind, Policy):
        raise CfkvError(
            f"{path}: class {kind.__name__} is no subclass of cfkv.policies._base.Policy; it needs {how}"
        )
    if inspect.isabstract(kind):
        raise CfkvError(
            f"{path}: class {kind.__name__} has no method score(self, view); higher = keep, one per slot"
        )
    if not dataclasses.is_dataclass(kind):
        raise CfkvError(f"{path}: class {kind.__name__} lacks @parameters; it needs {how}")
    with LinesOf(path):
        return make_policy(name)


def score_file(
    path: Path, run: Run, config: OfflineConfig, execution: Execution, load: Callable[[], LoadedModel]
) -> None:
    """Judge the policy of a file with random, position and oracle on the labels of a run, and print where it stands.

    Raises
    ------
    CfkvError
        For a file that holds no policy, an error inside it, or a run without labels.
    """
    with policy_file(path) as policy:
        name = policy.name
        policies = {
            "random": make_policy("random"),
            "position": Position(sinks=4),
            "oracle": make_policy("oracle"),
        }
        config = config.model_copy(update={"policies": (name,)})
        judge = Judge.of(run, config, {**policies, name: policy}, load)
        with LinesOf(path):
            rows, failures = _judged(judge, execution, name)
    if not rows:
        raise CfkvError(
            f"{run.path} has no labelled trace to judge {name} on; `cfkv validate {run.path}` says why"
        )
    schema = pl.DataFrame(pl.from_arrow(POLICY_VALIDITY.schema.empty_table())).schema
    summary = summarise(pl.DataFrame(rows, schema=schema, orient="row"), config)
    console = Console()
    for kind in sorted(summary["kind"].unique()):
        frame = summary.filter(kind=kind)
        for table in validity_tables(frame, config, own=name):
            console.print(table)
        console.print(escape(sentence(frame, name, kind)), "\n")
    for reason in sorted(set(failures)):
        console.print(f"{failures.count(reason)} traces could not be judged: {escape(reason)}")


def _judged(judge: Judge, execution: Execution, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    traces = judge.run.require("trace")
    for stage in judge.upstream(name):
        judge.run.wait_for(stage, patient=False)
    with Ticker("score", traces["n_items"]) as counter:
        for index in range(traces["n_parts"]):
            for trace in labelled_traces(judge.run, index, judge.kinds, judge.config.high_damage):
                found = judge.trace(index, trace, list(judge.policies), execution)
                rows += [row for each in found.values() for row in each.rows]
                failures += [found[name].reason or ""] if found[name].status != "ok" else []
                counter.advance(1)
    return rows, failures


def sentence(summary: pl.DataFrame, name: str, kind: str) -> str:
    """Where a policy's AUROC stands between random and oracle, and whether it can be told from random and position.

    Parameters
    ----------
    summary : DataFrame
        The rows of one kind and checkpoint of `validity_summary`.
    """
    areas = summary.filter(measure="auroc")
    plain = {row["policy"]: row for row in areas.filter(pl.col("versus").is_null()).iter_rows(named=True)}
    own, low, high = (plain[each]["estimate"] for each in (name, "random", "oracle"))
    if math.isnan(own) or not high > low:
        return f"{name} cannot be placed on {kind} labels: {plain[name]['nan_reason'] or 'oracle equals random'}."
    place = 100 * (own - low) / (high - low)
    where = "the whole way" if place >= 99.5 else f"{place:.0f} % of the way"
    text = f"{name} stands {where} from random (AUROC {low:.2f}) to oracle ({high:.2f}) on {kind} labels"
    if place < 0:
        text = f"{name} (AUROC {own:.2f}) stands below random ({low:.2f}) on {kind} labels"
    versus = {
        row["versus"]: row for row in areas.filter(policy=name).drop_nulls("versus").iter_rows(named=True)
    }
    told = [
        _difference(versus[each], label)
        for each, label in (("random", "random"), ("position", "position alone"))
    ]
    return f"{text}, {plain[name]['n_traces']} traces. {' '.join(told)}"


def _difference(row: dict[str, Any], other: str) -> str:
    size = f"{row['estimate']:+.2f} in AUROC"
    if math.isnan(row["adjusted_pvalue"]):
        return f"Against {other}: {size}, untested ({row['nan_reason']})."
    size += f" [{row['low']:+.2f}, {row['high']:+.2f}], adjusted p = {row['adjusted_pvalue']:.2g}"
    if row["adjusted_pvalue"] >= SIGNIFICANCE:
        return f"Not distinguishable from {other}: {size}."
    return f"{'Better' if row['estimate'] > 0 else 'Worse'} than {other}: {size}."
