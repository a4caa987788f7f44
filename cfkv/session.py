"""One invocation: a run directory, its recipe, the processes, and a model that is loaded at most once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cfkv.config import Execution, LabelConfig, Recipe
from cfkv.stage import Run, StageResult
from cfkv.workers import Workers, check_placement, workers

if TYPE_CHECKING:
    from cfkv.models.loading import LoadedModel


@dataclass
class Session:
    """Runs stages of one recipe in one directory."""

    run: Run
    recipe: Recipe
    execution: Execution
    crew: Workers
    _loaded: LoadedModel | None = None
    _description: dict[bool, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path, recipe: Recipe, execution: Execution) -> Session:
        """A session of this process; refuses a placement that cannot be meant."""
        check_placement(execution)
        return cls(Run(directory), recipe, execution, workers(execution.shard))

    def check_names(self, stages: Sequence[str]) -> None:
        """Raise CfkvError for an unknown dataset, label kind or signal group before any stage is run."""
        if "trace" in stages and self.recipe.trace.mode != "import":
            from cfkv.problems._base import problem_sources

            problem_sources.get(self.recipe.trace.dataset)
        for name in stages:
            if name.startswith("label:"):
                from cfkv.labels._base import label_kinds

                kind = label_kinds.get(name.removeprefix("label:"))
                kind.settings(self._label_config(kind.name))
        if "evaluate online" in stages:
            from cfkv.evaluation._arms import arms, needs_labels

            labelled = needs_labels([arm.policy for arm in arms(self.recipe.online)])
            if labelled and f"label:{self.recipe.online.label}" not in stages:
                from cfkv.evaluation.online import require_label

                require_label(self.run, self.recipe.online.label, labelled)
        if "probe" in stages:
            from cfkv.signals._stage import check_groups

            check_groups(self.recipe.probe)
        if "evaluate offline" in stages:
            from cfkv.evaluation._names import named_policies

            named_policies(self.recipe.offline.policies)

    def load(self) -> LoadedModel:
        """The model, loaded on the first call."""
        if self._loaded is None:
            from cfkv.models.loading import load_model

            self._loaded = load_model(self.recipe.model, self.execution)
        return self._loaded

    def describe(self, loaded: LoadedModel, *, caching: bool = True) -> dict[str, Any]:
        """The model and its self-check, for the manifest; measured on the first call.

        Without `caching`, only what a stage needs that reads no cache of keys and values is checked.
        """
        if caching not in self._description:
            from cfkv.models.selfcheck import description

            self._description[caching] = description(loaded, caching=caching)
        return self._description[caching]

    def trace(self) -> StageResult:
        """Make traces."""
        from cfkv.traces.stage import run_trace

        return run_trace(self.run, self.recipe, self.execution, self.crew, self.load, self.describe)

    def label(self, kind: str) -> StageResult:
        """Make one kind of label."""
        from cfkv.labels._stage import run_label

        return run_label(
            self.run, self._label_config(kind), self.execution, self.crew, self.load, self.describe
        )

    def _label_config(self, kind: str) -> LabelConfig:
        return next(config for config in self.recipe.label if config.kind == kind)

    def probe(self) -> StageResult:
        """Stream signals."""
        from cfkv.signals._stage import run_probe

        return run_probe(self.run, self.recipe.probe, self.execution, self.crew, self.load, self.describe)

    def evaluate_online(self) -> StageResult:
        """Run policies at budgets."""
        from cfkv.evaluation.online import run_online

        return run_online(self.run, self.recipe.online, self.execution, self.crew, self.load, self.describe)

    def compare(self) -> StageResult:
        """Compare what was evaluated."""
        from cfkv.analysis._compare_stage import run_compare
        from cfkv.evaluation._arms import arms

        wanted = [arm.name for arm in arms(self.recipe.online)]
        return run_compare(self.run, self.recipe.online, wanted, patient=self.crew.world_size > 1)

    def correlate(self) -> StageResult:
        """Correlate signals with labels."""
        from cfkv.analysis._stage import run_correlate

        return run_correlate(
            self.run, self.recipe.correlate, self.execution, patient=self.crew.world_size > 1
        )

    def evaluate_offline(self) -> StageResult:
        """Hold policies against labels."""
        from cfkv.evaluation.offline import run_offline

        return run_offline(self.run, self.recipe.offline, self.execution, self.crew, self.load, self.describe)

    def validity(self) -> StageResult:
        """Sum up all judged policies over traces."""
        from cfkv.evaluation._summary import run_summary

        return run_summary(self.run, self.recipe.offline, patient=self.crew.world_size > 1)

    def report(self) -> Path:
        """Write the report."""
        from cfkv.report._stage import run_report

        return run_report(self.run, self.recipe.report)

    def waiting_for(self, stages: Sequence[str]) -> list[str]:
        """Stages of which other shards still owe parts, once this shard's own parts of `stages` are there."""
        if self.crew.shards == 1:
            return []
        if self.crew.world_size > 1:
            self.settle(stages)
        recorded = self.run.manifest.read()["stages"]
        read: list[str] = ["trace", "label:", "probe:"] if {"correlate", "report"} & set(stages) else []
        read += ["evaluate online"] if "compare" in stages else []
        names = [name for name in recorded if name.startswith(tuple(read))]
        if "validity" in stages:
            from cfkv.evaluation.offline import recorded_names

            names += recorded_names(self.run, self.recipe.offline)
        return [name for name in names if self.run.missing_parts(name)]

    def leave_analysis(self) -> None:
        """Note how the recipe wants the analysis, for whoever finishes the run by `cfkv correlate RUN`."""
        self.run.manifest.record_config("correlate", self.recipe.correlate)
        self.run.manifest.record_config("report", self.recipe.report)

    def settle(self, stages: Sequence[str]) -> int:
        """Failed items of this shard's share of `stages`, once all its parts are there.

        Only rank 0 waits and counts. A launcher ends all processes when one exits with an error, so the others
        report none, and rank 0 does it last.
        """
        if self.crew.rank > 0:
            return 0
        failed = 0
        for name in self._model_stages(stages):
            parts = [i for i in range(self.run.require(name)["n_parts"]) if self.crew.shard_owns(i)]
            self.run.wait_for(name, parts=parts, patient=True)
            failed += StageResult(name, self.run.statuses(name, parts)).failed
        return failed

    def _model_stages(self, stages: Sequence[str]) -> list[str]:
        """Stages that processes share, by the names under which they are recorded."""
        names: list[str] = []
        for name in stages:
            if name == "probe":
                names += [f"probe:{group}" for group in self.recipe.probe.groups]
            elif name == "evaluate online":
                from cfkv.evaluation._arms import arms

                names += [f"{name}:{arm.name}" for arm in arms(self.recipe.online)]
            elif name == "evaluate offline":
                from cfkv.evaluation.offline import recorded_names

                names += recorded_names(self.run, self.recipe.offline)
            elif name not in ("correlate", "compare", "validity", "report"):
                names.append(name)
        return names

    def close(self) -> None:
        """Leave the process group that the launcher made."""
        if self._loaded is not None and self.crew.world_size > 1:
            from accelerate import PartialState

            PartialState().destroy_process_group()
