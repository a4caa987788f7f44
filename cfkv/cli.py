"""The command line. Exit codes: 0 done, 1 some items failed, 2 usage or configuration.

Nothing heavy is imported before a command needs it, so that `cfkv --help` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from pydantic import ValidationError

from cfkv import __version__
from cfkv.config import (
    BenchConfig,
    Config,
    CorrelateConfig,
    Execution,
    LabelConfig,
    ModelConfig,
    OfflineConfig,
    OnlineConfig,
    ProbeConfig,
    Recipe,
    ReportConfig,
    TraceConfig,
    apply_settings,
    load_recipe,
    validation_error,
)
from cfkv.errors import CfkvError

DONE, ITEMS_FAILED, USAGE = 0, 1, 2

app = App(
    name="cfkv",
    version=__version__,
    default_parameter=Parameter(negative=""),
    help="Which cached tokens does a reasoning trace need? Counterfactual labels, streamed signals, honest "
    "statistics.\n\nStart with `cfkv quickstart`. A stage command takes what it is not told from the run "
    "directory. Exit codes: 0 done, 1 some items failed, 2 usage or configuration.",
)

Directory = Annotated[Path, Parameter(help="Run directory; re-running a command continues there.")]
Flat = Parameter(name="*")
ModelFlags = Annotated[ModelConfig, Flat]
BenchFlags = Annotated[BenchConfig, Flat]
ExecutionFlags = Annotated[Execution, Flat]
RecipeFlag = Annotated[
    Path | None, Parameter(help="YAML recipe whose section for this stage is used; flags win over it.")
]


@app.command
def quickstart(
    directory: Directory = Path("runs/quickstart"), /, *, execution: ExecutionFlags = Execution()
) -> int:
    """Run every stage on the built-in model; prints where the report is."""
    code = _run_recipe(quickstart_recipe(), directory, execution)
    if code == DONE and not execution.dry_run and (directory / "report.html").exists():
        from cfkv.truth import print_truth

        print_truth(directory)
    return code


def quickstart_recipe() -> Recipe:
    """60 traces of the built-in model, windows of 8 with stride 4."""
    return Recipe(
        trace=TraceConfig(dataset="registers", limit=60, max_new_tokens=384, part_size=20),
        label=(LabelConfig(window=8, stride=4, max_new_tokens=32),),
    )


@app.command
def run(
    recipe: Annotated[Path, Parameter(help="YAML recipe; see pipelines/.")],
    directory: Annotated[
        Path | None, Parameter(help="Run directory; default runs/NAME for NAME.yaml.")
    ] = None,
    /,
    *,
    set: Annotated[list[str] | None, Parameter(help="Override section.key=value; may be repeated.")] = None,
    execution: ExecutionFlags = Execution(),
) -> int:
    """Run a whole experiment: trace, label, probe, correlate, report; policies too if it has `online`. Resumable."""
    loaded = apply_settings(load_recipe(recipe), set or [])
    return _run_recipe(loaded, directory or Path("runs") / recipe.stem, execution)


@app.command
def trace(
    directory: Directory,
    /,
    *,
    recipe: RecipeFlag = None,
    model: ModelFlags = ModelConfig(),
    config: Annotated[TraceConfig, Flat] = TraceConfig(),
    execution: ExecutionFlags = Execution(),
) -> int:
    """Make traces: generate, restate worked solutions, or import."""
    whole = _layered(directory, recipe, model=model, trace=config)
    return _stages(directory, whole, execution, ["trace"])


@app.command
def label(
    directory: Directory,
    /,
    *,
    recipe: RecipeFlag = None,
    model: ModelFlags = ModelConfig(),
    config: Annotated[LabelConfig, Flat] = LabelConfig(),
    execution: ExecutionFlags = Execution(),
) -> int:
    """Label the correct traces by a counterfactual."""
    whole = _layered(directory, recipe, model=model, label=config)
    return _stages(directory, whole, execution, [f"label:{config.kind}"])


@app.command
def probe(
    directory: Directory,
    /,
    *,
    recipe: RecipeFlag = None,
    model: ModelFlags = ModelConfig(),
    config: Annotated[ProbeConfig, Flat] = ProbeConfig(),
    execution: ExecutionFlags = Execution(),
) -> int:
    """Stream signals of every token and layer."""
    whole = _layered(directory, recipe, model=model, probe=config)
    return _stages(directory, whole, execution, ["probe"])


@app.command
def correlate(
    directory: Directory,
    /,
    *,
    recipe: RecipeFlag = None,
    config: Annotated[CorrelateConfig, Flat] = CorrelateConfig(),
    overwrite: Annotated[
        bool, Parameter(help="Replace correlations made with another configuration.")
    ] = False,
) -> int:
    """Hold signals against labels; prints each signal at its strongest."""
    execution = Execution(overwrite=overwrite)
    return _stages(directory, _layered(directory, recipe, correlate=config), execution, ["correlate"])


evaluate = App(name="evaluate", help="Judge policies: by labels, or by the answers that survive a budget.")
app.command(evaluate)


@evaluate.command
def offline(
    directory: Directory,
    /,
    *,
    recipe: RecipeFlag = None,
    model: ModelFlags = ModelConfig(),
    config: Annotated[OfflineConfig, Flat] = OfflineConfig(),
    execution: ExecutionFlags = Execution(),
) -> int:
    """Hold policies' scores against labels, without decoding; prints which beat chance."""
    whole = _layered(directory, recipe, model=model, offline=config)
    return _stages(directory, whole, execution, ["evaluate offline", "validity"])


@evaluate.command
def online(
    directory: Directory,
    /,
    *,
    recipe: RecipeFlag = None,
    model: ModelFlags = ModelConfig(),
    config: Annotated[OnlineConfig, Flat] = OnlineConfig(),
    execution: ExecutionFlags = Execution(),
) -> int:
    """Run policies at real budgets; prints accuracy beside the full cache and random eviction."""
    whole = _layered(directory, recipe, model=model, online=config)
    return _stages(directory, whole, execution, ["evaluate online", "compare"])


@app.command
def score(
    file: Annotated[Path, Parameter(help="Python file with one policy; see pipelines/example_policy.py.")],
    directory: Annotated[Path, Parameter(help="Run directory with labels.")],
    /,
    *,
    label: Annotated[str, Parameter(help="Label kind; all: every one of the run.")] = "all",
    model: ModelFlags = ModelConfig(),
    execution: ExecutionFlags = Execution(),
) -> int:
    """Judge a policy of your own between random and oracle; writes nothing."""
    from cfkv.evaluation.score_file import score_file
    from cfkv.session import Session

    directory = directory.expanduser()
    whole = _layered(directory, None, model=model)
    session = Session.open(directory, whole, execution)
    kept = whole.offline.model_copy(update={"kinds": (label,), "checkpoints": ("end",)})
    score_file(file.expanduser(), session.run, kept, execution, session.load)
    return DONE


@app.command
def report(
    directory: Directory,
    /,
    *,
    recipe: RecipeFlag = None,
    config: Annotated[ReportConfig, Flat] = ReportConfig(),
) -> int:
    """Write figures and one self-contained report.html."""
    return _stages(directory, _layered(directory, recipe, report=config), Execution(), ["report"])


@app.command
def validate(directory: Annotated[Path, Parameter(help="Run directory to check.")], /) -> int:
    """Check a run's tables: whole, consistent, recomputed; 0 sound, 1 not, 2 no run there."""
    from cfkv.listing import print_validation
    from cfkv.validate.run import validate as check

    found = check(directory.expanduser())
    print_validation(found)
    return DONE if found.sound else ITEMS_FAILED


@app.command(name="ls")
def list_members(
    family: Annotated[str, Parameter(help="signals, labels, policies, problems, models or benches.")],
    name: Annotated[str | None, Parameter(help="A policy, whose card is printed.")] = None,
    /,
) -> int:
    """List what can be named: signals, labels, policies, problems, models or benches; or one policy's card."""
    from cfkv.listing import print_card, print_family

    if name is None:
        print_family(family)
    else:
        print_card(family, name)
    return DONE


@app.command
def bench(
    name: Annotated[str, Parameter(help="Which bench; `cfkv ls benches` lists them.")],
    /,
    *,
    json: Annotated[Path | None, Parameter(help="Write the figures to this file as well.")] = None,
    model: ModelFlags = ModelConfig(),
    config: BenchFlags = BenchConfig(),
    device: Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    threads: Annotated[int | None, Parameter(help="CPU threads of torch.")] = None,
) -> int:
    """Measure ratios of speed and memory on this machine; exits 0 whatever it measured."""
    from cfkv.bench._base import benches, machine
    from cfkv.bench._base import report as print_report
    from cfkv.models.loading import load_model

    chosen = benches.get(name)
    if "model" not in model.model_fields_set:
        model = model.model_copy(update={"model": chosen.model})
    loaded = load_model(model, Execution(device=device, threads=threads))
    print_report(name, machine(loaded), chosen().run(loaded, config), json)
    return DONE


@app.command
def doctor(
    *,
    model: ModelFlags = ModelConfig(),
    device: Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    device_map: Annotated[
        str | None, Parameter(help="auto: spread the model over this machine's GPUs.")
    ] = None,
) -> int:
    """Check what a model can do here."""
    from cfkv.doctor import examine

    return DONE if examine(model, Execution(device=device, device_map=device_map)) else ITEMS_FAILED


def _layered(directory: Path, recipe: Path | None, **flags: Config) -> Recipe:
    """Defaults < what the directory or the recipe says < flags that were given."""
    from cfkv.manifest import Manifest

    base = load_recipe(recipe) if recipe is not None else Manifest(directory.expanduser()).recipe()
    changed: dict[str, Any] = {}
    for section, given in flags.items():
        values = {name: getattr(given, name) for name in given.model_fields_set}
        if section == "label":
            kind = values.get("kind", "occlusion")
            old = next((c for c in base.label if c.kind == kind), LabelConfig(kind=kind))
            others = tuple(c for c in base.label if c.kind != kind)
            changed["label"] = (*others, old.model_copy(update=values))
        else:
            changed[section] = getattr(base, section).model_copy(update=values)
    return base.model_copy(update=changed)


def _run_recipe(recipe: Recipe, directory: Path, execution: Execution) -> int:
    """All stages; those of policies only if the recipe has that section. What needs the model comes first: shards."""
    labels = [f"label:{config.kind}" for config in recipe.label]
    online = "online" in recipe.model_fields_set
    evaluation, comparison = (["evaluate online"], ["compare"]) if online else ([], [])
    stages = ["trace", *labels, "probe", *evaluation, "correlate", *comparison, "report"]
    return _stages(directory, recipe, execution, stages)


def _stages(directory: Path, recipe: Recipe, execution: Execution, stages: Sequence[str]) -> int:
    from cfkv.session import Session

    directory = directory.expanduser()
    session = Session.open(directory, recipe, execution)
    session.check_names(stages)
    if execution.dry_run:
        from cfkv.listing import print_plan

        print_plan(recipe, execution, directory, stages)
        return DONE
    try:
        return _execute(session, stages)
    finally:
        session.close()


def _execute(session: Any, stages: Sequence[str]) -> int:
    from cfkv.listing import (
        print_comparison,
        print_correlations,
        print_owed,
        print_result,
        print_validity,
    )

    failed = 0
    for name in stages:
        if name in ("correlate", "compare", "validity", "report"):
            if session.crew.rank > 0:
                continue
            owed = session.waiting_for(stages)
            if owed:
                print_owed(session, stages, owed)
                break
        if name == "report":
            print(f"report: {session.report()}")
            continue
        family, _, kind = name.partition(":")
        method = getattr(session, family.replace(" ", "_"))
        result = method(kind) if kind else method()
        failed += result.failed
        if session.crew.speaks:
            print_result(session.run, result, shared=session.crew.count > 1)
            if name == "correlate":
                print_correlations(session.run)
            elif name == "compare":
                print_comparison(session.run)
            elif name == "validity":
                print_validity(session.run, session.recipe.offline)
    if session.crew.world_size > 1:
        failed = session.settle(stages)
    return ITEMS_FAILED if failed else DONE


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    # Read by OpenMP when torch loads: idle threads sleep. Spinning ones starve a busy or shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? and goes on
    sys.exit(_guarded(list(sys.argv[1:] if arguments is None else arguments)))


def _guarded(arguments: list[str]) -> int:
    try:
        found = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CfkvError as error:
        return _complain(str(error))
    except CycloptsError as error:
        return _complain(_usage(error))
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        return _complain(
            f"{error.strerror or error}:{place}; what was written stays, the same command continues"
        )
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    return found if isinstance(found, int) else DONE


def _usage(error: CycloptsError) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ValidationError):
        return str(validation_error(cause, Config, "command line"))
    return str(error)


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    main()
