"""What the commands print: families, plans, results, correlations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cfkv.config import Execution, OfflineConfig, Recipe
from cfkv.errors import CfkvError, unknown_name
from cfkv.stage import MANY_NAMES, Run, StageResult

if TYPE_CHECKING:
    from cfkv.session import Session
    from cfkv.validate._check import Check
    from cfkv.validate.run import Validation

FAMILIES = ("signals", "labels", "policies", "problems", "models", "benches")


def first_line(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").strip().split("\n")[0]


def family_table(family: str) -> Table:
    """One row per member of a family, from what each member declares.

    Raises
    ------
    CfkvError
        For a family that does not exist.
    """
    if family == "signals":
        from cfkv.signals._base import horizon_text, signal_kinds

        table = Table("signal", "group", "unit", "causal", "source", "what it is")
        for signal in signal_kinds.members():
            causal, text = horizon_text(signal.horizon), first_line(signal.__doc__)
            table.add_row(signal.name, signal.group, signal.unit, causal, signal.source, text)
    elif family == "labels":
        from cfkv.labels._base import label_kinds

        table = Table("label", "unit", "sign", "source", "what it does")
        for label in label_kinds.members():
            table.add_row(label.name, label.unit, label.sign, label.source, first_line(label.__doc__))
    elif family == "problems":
        from cfkv.problems._base import problem_sources

        table = Table("dataset", "needs --path", "licence", "source", "rows")
        for source in problem_sources.members():
            needs = "yes" if source.needs_path else "no"
            table.add_row(source.name, needs, source.licence, source.source, first_line(source.__doc__))
    elif family == "benches":
        from cfkv.bench._base import benches

        table = Table("bench", "model", "what it measures")
        for each in benches.members():
            table.add_row(each.name, each.model, first_line(each.__doc__))
    elif family == "policies":
        from cfkv.policies._base import policy_kinds

        table = Table("policy", "evicts by", "source", "what it keeps")
        for policy in policy_kinds.members():
            text = first_line(policy.__doc__)
            table.add_row(policy.name, policy.mask_scope, policy.source, text)
    elif family == "models":
        from cfkv.models.sources import NAMED

        table = Table("model", "what it is")
        for name, text in NAMED.items():
            table.add_row(name, text)
        table.add_row("org/name", "any decoder-only model on the hub, safetensors only")
        table.add_row("FOLDER", "a local folder with config.json and safetensors")
        table.add_row("FILE.gguf", "a GGUF file, dequantised once")
    else:
        raise unknown_name("family", family, FAMILIES)
    table.columns[0].no_wrap = True
    return table


def print_family(family: str) -> None:
    """Print a family as a table."""
    Console().print(family_table(family))


def print_card(family: str, name: str) -> None:
    """Print the card of one policy.

    Raises
    ------
    CfkvError
        For another family, or an unknown name.
    """
    if family != "policies":
        raise CfkvError(f"only policies have cards, not {family!r}; write `cfkv ls {family}`")
    from cfkv.policies._card import policy_card

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for heading, text in policy_card(name):
        table.add_row(heading, Text(text))
    Console().print(table)


def print_plan(recipe: Recipe, execution: Execution, directory: Path, stages: Sequence[str]) -> None:
    """Print the costs of `stages`; analysis stages cost seconds and are left out."""
    from cfkv.plan import plan

    table = Table(
        "stage", "items", "forwards", "tokens", "disk", title=f"dry run of {directory}: nothing was run"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    costs = plan(recipe, execution, directory, stages)
    for cost in costs:
        bound = "<= " if cost.bound else ""
        numbers = (cost.items, cost.forwards, cost.tokens)
        table.add_row(
            cost.stage, *(f"{bound}{number:,}" for number in numbers), f"{bound}{_bytes(cost.disk)}"
        )
    console = Console()
    console.print(table)
    if any(cost.stage.startswith("label") for cost in costs):
        console.print(
            "label items are windows, or blocks at a checkpoint; forwards leave out the decoding of windows whose "
            "draft fails "
            f"(at most {max(config.max_new_tokens for config in recipe.label)} steps per batch)"
        )
    if "evaluate online" in stages:
        console.print(
            "evaluation items are traces x arms x samples; traces that turn out wrong may be left out, and rows that "
            "stop early leave their batch"
        )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def print_owed(session: Session, stages: Sequence[str], owed: Sequence[str]) -> None:
    """Say that the analysis among `stages` waits for other shards, and who finishes the run."""
    path = session.run.path
    what = ", ".join(owed) if len(owed) <= MANY_NAMES else f"{len(owed)} stages"
    finishing = {
        "validity": "evaluate offline",
        "compare": "evaluate online",
        "correlate": "correlate",
        "report": "report",
    }
    commands = [f"`cfkv {command} {path}`" for stage, command in finishing.items() if stage in stages]
    print(f"other shards still owe parts of {what}; the last shard, or a later")
    print(f"{' and '.join(commands)}, finishes the run")
    if "correlate" in stages:
        session.leave_analysis()


def print_comparison(run: Run) -> None:
    """Print the accuracy of every policy at every budget."""
    from cfkv import store
    from cfkv.analysis.policy_table import accuracy_table
    from cfkv.schemas import POLICY_ACCURACY, POLICY_COMPARISONS

    tables = (store.collect(run.path, table) for table in (POLICY_ACCURACY, POLICY_COMPARISONS))
    Console().print(accuracy_table(*tables))


def print_result(run: Run, result: StageResult, *, shared: bool) -> None:
    """One line per stage: what was done, found, and how the items ended; `shared`: by this process alone."""
    if result.name in ("correlate", "compare", "validity"):
        if result.note:
            print(result.note)
        return
    parts = f"{result.parts_written} parts written"
    if result.parts_found:
        parts += f", {result.parts_found} already done"
    statuses = (
        ", ".join(f"{count} {status}" for status, count in sorted(result.statuses.items())) or "no items"
    )
    share = ", this process's share" if shared else ""
    print(f"{result.name}: {statuses} ({parts}{share}){result.note}")
    if result.failed:
        print(f"  failed items carry their reason: cfkv.load({str(run.path)!r}), column `reason`")


def print_correlations(run: Run) -> None:
    """The table of the study, for a person."""
    from cfkv import store
    from cfkv.analysis.summary import correlation_table
    from cfkv.schemas import CORRELATIONS

    Console().print(correlation_table(store.scan(run.path, CORRELATIONS).collect()))


def print_validity(run: Run, config: OfflineConfig) -> None:
    """Print every judged policy against each label."""
    from cfkv import store
    from cfkv.analysis.validity_summary import validity_tables
    from cfkv.schemas import VALIDITY_SUMMARY

    summary = store.collect(run.path, VALIDITY_SUMMARY)
    if summary.is_empty():
        print("no trace is labelled, so that no policy can be held against anything; `token_labels` says why")
    for table in validity_tables(summary, config):
        Console().print(table)


def print_validation(found: Validation) -> None:
    """Every check with its count, then the violations, how the items ended, and what is known of the noise."""
    from rich import box
    from rich.markup import escape

    console = Console()
    table = Table(
        "table", "check", "looked at", "wrong", title=f"checks of {found.path}", box=box.SIMPLE_HEAD
    )
    table.columns[0].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for place, checks in _by_name(found.checks).items():
        seen, wrong = sum(check.seen for check in checks), sum(check.wrong for check in checks)
        table.add_row(*place, f"{seen:,}", f"[bold red]{wrong:,}[/]" if wrong else "0")
    console.print(table)
    for check in found.checks:
        if not check.wrong:
            continue
        console.print(f"[bold red]{check.wrong:,} wrong[/] in {escape(check.table)}: {escape(check.name)}")
        for example in check.examples:
            console.print(
                f"  {escape(example.where)}: {escape(example.seen)}; expected {escape(example.expected)}"
            )
        if check.wrong > len(check.examples):
            console.print(f"  and {check.wrong - len(check.examples):,} more")
    statuses = Table("table", "status", "rows", "most frequent reason", title="statuses", box=box.SIMPLE_HEAD)
    statuses.columns[2].justify = "right"
    for entry in found.statuses:
        for status, rows, reason in entry.rows:
            statuses.add_row(escape(entry.place), escape(status), f"{rows:,}", escape(reason))
    console.print(statuses)
    floors = Table("labels", "noise", "", title="noise floor", box=box.SIMPLE_HEAD)
    floors.columns[0].no_wrap = True
    for kind, facts in found.floors.items():
        for name, text in facts:
            floors.add_row(escape(kind), escape(name), escape(text))
    if found.floors:
        console.print(floors)
    total = sum(check.wrong for check in found.checks)
    console.print("sound" if found.sound else f"[bold red]not sound: {total:,} violations[/]")


def _by_name(checks: Sequence[Check]) -> dict[tuple[str, str], list[Check]]:
    """Checks that differ only in the kind or group of their table, together."""
    found: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        found.setdefault((check.table.partition("/")[0], check.name), []).append(check)
    return found
