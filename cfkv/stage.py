"""The driver that every stage shares: plan, refuse, skip what is done, process, commit, count.

A stage is a name, a configuration, what it reads and what it writes. Its fingerprint covers the configuration
and the fingerprints upstream, so that a table can never quietly mix two settings.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from cfkv import store
from cfkv.config import differences, fingerprint
from cfkv.errors import CfkvError
from cfkv.manifest import Manifest, library_versions, now
from cfkv.progress import Ticker
from cfkv.schemas import NOT_FAILURES, TABLES, Table
from cfkv.store import PartState
from cfkv.workers import Workers
from cfkv.writer import Writer

POLL_SECONDS, SAY_SECONDS = 0.5, 5.0
STALL_SECONDS = 1800.0
MANY_NAMES = 8  # that still fit a progress line
RECORD_KEYS = frozenset({"fingerprint", "identity", "n_parts", "n_items", "outputs"})


@dataclass(frozen=True)
class Output:
    """A table, or one partition of it, that a stage writes."""

    table: Table
    value: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What identifies a run of one stage.

    `outputs` are written in this order for each part; a part is done when all of them are. The last one has a
    `status` column, from which failures are counted. `version` is raised when the code changes its results.
    `upstream` names the stages that are read.
    """

    name: str
    config: Mapping[str, Any]
    outputs: tuple[Output, ...]
    n_parts: int
    n_items: int
    version: int = 1
    upstream: tuple[str, ...] = ()


@dataclass
class StageResult:
    """Counts of one process's share: items by status, parts written and found done."""

    name: str
    statuses: Counter[str] = field(default_factory=Counter)
    parts_written: int = 0
    parts_found: int = 0
    note: str = ""  # what a person should know beside the counts

    @property
    def failed(self) -> int:
        """Items whose status is a failure."""
        return sum(count for status, count in self.statuses.items() if status not in NOT_FAILURES)


Rows = Sequence[Mapping[str, Any]]
Contents = Sequence[Rows | pa.Table]
Process = Callable[[int, Callable[[int], None]], Contents]


@dataclass(frozen=True)
class Job:
    """One of several stages that are done together: its fingerprint, and the columns that a registry adds."""

    stage: Stage
    mark: str
    extra_columns: pa.Schema | None = None


JointProcess = Callable[[int, Sequence[Job], Callable[[int], None]], Sequence[Contents]]


def joint_name(names: Sequence[str]) -> str:
    """`probe:hidden+kv` for probe:hidden and probe:kv; only the number of many."""
    family, colon, _ = names[0].partition(":")
    if len(names) > MANY_NAMES:
        return f"{family}, {len(names)} at once"
    return family + colon + "+".join(name.partition(":")[2] for name in names)


class Run:
    """A run directory."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise CfkvError(f"{path} is a file; a run directory is a folder: name another path")
        self.path = path
        self.manifest = Manifest(path)

    def require(self, name: str) -> dict[str, Any]:
        """The record of an upstream stage, after checking that it fits what it was made from.

        Raises
        ------
        CfkvError
            If the stage was not run, or was run on an earlier version of what it reads.
        """
        record = self._record(name)
        command = f"cfkv {name.partition(':')[0]} {self.path}"
        if record is None:
            raise CfkvError(f"{self.path} has no {name!r} stage yet; run `{command}` first")
        for upstream, used in record["identity"].get("upstream", {}).items():
            current = self.require(upstream)["fingerprint"]
            if current != used:
                raise CfkvError(
                    f"{self.path}: stage {name!r} was made from {upstream} {used}, but that stage is now "
                    f"{current}; run `{command} --overwrite`"
                )
        return record

    def _record(self, name: str) -> dict[str, Any] | None:
        """A stage's record, or None; a mangled one is refused."""
        record = self.manifest.stage(name)
        if record is not None and (not isinstance(record, dict) or not record.keys() >= RECORD_KEYS):
            raise CfkvError(
                f"{self.manifest.path}: the record of stage {name!r} lacks some of {', '.join(sorted(RECORD_KEYS))}; "
                "restore the file, or use another directory"
            )
        return record

    def identity(self, stage: Stage) -> dict[str, Any]:
        """What the fingerprint covers, as JSON-like data."""
        upstream = {name: self.require(name)["fingerprint"] for name in stage.upstream}
        versions = {output.table.name: output.table.version for output in stage.outputs}
        return {
            "config": dict(stage.config),
            "stage_version": stage.version,
            "schemas": versions,
            "upstream": upstream,
        }

    def open_stage(self, stage: Stage, *, overwrite: bool, extra: Mapping[str, Any] | None = None) -> str:
        """Check that the stage may be run here and record it; returns its fingerprint.

        Raises
        ------
        CfkvError
            If it was run here with another configuration and `overwrite` is off; lists the differences.
        """
        identity = self.identity(stage)
        mark = fingerprint({"stage": stage.name, **identity})
        record = self._record(stage.name)
        if record is not None and record["fingerprint"] != mark and not overwrite:
            lines = "\n  ".join(differences(record["identity"], identity))
            raise CfkvError(
                f"{self.path} holds {stage.name!r} made with another configuration:\n  {lines}\n"
                "use another run directory, or --overwrite to replace this stage"
            )
        if record is None and not overwrite:
            self._refuse_foreign_parts(stage, mark)
        if record is None or record["fingerprint"] != mark:
            self.manifest.replace_stage(
                stage.name,
                {
                    "fingerprint": mark,
                    "identity": identity,
                    "n_parts": stage.n_parts,
                    "n_items": stage.n_items,
                    "outputs": [[output.table.name, output.value] for output in stage.outputs],
                    "started": now(),
                    "versions": library_versions(),
                    **(extra or {}),
                },
            )
        return mark

    def _refuse_foreign_parts(self, stage: Stage, mark: str) -> None:
        for output in stage.outputs:
            for index, path in store.part_paths(self.path, output.table, output.value).items():
                state = store.part_state(self.path, output.table, output.value, index, mark)
                if state is PartState.OTHER:
                    raise CfkvError(
                        f"{path} was written by another configuration, and run.json does not say which; use "
                        "another run directory, or --overwrite to replace this stage"
                    )

    def done(self, outputs: Sequence[Output], index: int, mark: str) -> bool:
        """Whether all outputs of a part are done."""
        states = [store.part_state(self.path, o.table, o.value, index, mark) for o in outputs]
        return all(state is PartState.DONE for state in states)

    def missing_parts(self, name: str, parts: Sequence[int] | None = None) -> list[int]:
        """Those of `parts` (default: all) of a recorded stage that are not done."""
        record = self.require(name)
        outputs = [Output(TABLES[table], value) for table, value in record["outputs"]]
        asked = range(record["n_parts"]) if parts is None else parts
        return [index for index in asked if not self.done(outputs, index, record["fingerprint"])]

    def wait_for(self, name: str, *, parts: Sequence[int] | None = None, patient: bool) -> None:
        """Return when the parts of `name` (default: all) are done.

        With `patient`, other processes are given time: waiting ends with an error only after half an hour
        without a new part.

        Raises
        ------
        CfkvError
            If parts are missing and nobody is expected to write them, or nobody did.
        """
        seen, since, said = None, time.monotonic(), False
        pause = threading.Event()
        while True:
            missing = self.missing_parts(name, parts)
            if not missing:
                return
            if missing != seen:
                seen, since = missing, time.monotonic()
            if not patient or time.monotonic() - since > STALL_SECONDS:
                total = self.require(name)["n_parts"]
                raise CfkvError(
                    f"{self.path}: {len(missing)} of {total} parts of stage {name!r} are missing (first: "
                    f"{missing[0]}); run `cfkv {name.partition(':')[0]} {self.path}` to finish it"
                )
            if not said and time.monotonic() - since > SAY_SECONDS:
                said = True
                print(
                    f"waiting for {len(missing)} parts of {name!r} that other processes write",
                    file=sys.stderr,
                )
            pause.wait(POLL_SECONDS)

    def execute(
        self,
        stage: Stage,
        process: Process,
        crew: Workers,
        *,
        mark: str,
        items_of_part: Callable[[int], int],
        extra_columns: pa.Schema | None = None,
    ) -> StageResult:
        """Do this process's parts that are not done.

        `process(index, advance)` returns one row list (or Arrow table) per output, in their order.
        """

        def alone(index: int, jobs: Sequence[Job], advance: Callable[[int], None]) -> list[Contents]:
            return [process(index, advance)]

        job = Job(stage, mark, extra_columns)
        return self.execute_jointly([job], alone, crew, items_of_part=items_of_part, behind=False)[0]

    def execute_jointly(
        self,
        jobs: Sequence[Job],
        process: JointProcess,
        crew: Workers,
        *,
        items_of_part: Callable[[int], int],
        behind: bool = True,
    ) -> list[StageResult]:
        """Do this process's parts of several stages that share the work and have the same parts.

        `process(index, jobs, advance)` gets those jobs whose part is not done, and returns what to write of each.
        With `behind`, a part is written while the next one is processed: a kill then costs one part more.
        """
        results = [StageResult(job.stage.name) for job in jobs]
        mine = [index for index in range(jobs[0].stage.n_parts) if crew.owns(index)]
        owed: dict[int, list[int]] = {}
        for place, (job, result) in enumerate(zip(jobs, results, strict=True)):
            todo = [index for index in mine if not self.done(job.stage.outputs, index, job.mark)]
            result.parts_found = len(mine) - len(todo)
            for output in job.stage.outputs:
                store.remove_unfinished(self.path, output.table, output.value, set(mine))
            for index in todo:
                owed.setdefault(index, []).append(place)
            self.manifest.event(
                "stage_started",
                stage=job.stage.name,
                fingerprint=job.mark,
                parts=len(todo),
                worker=crew.index,
            )
        total = sum(items_of_part(index) for index in owed)
        with (
            Ticker(joint_name([job.stage.name for job in jobs]), total, quiet=not crew.speaks) as counter,
            Writer(behind=behind) as writer,
        ):
            for index, places in sorted(owed.items()):
                own = [jobs[place] for place in places]
                contents = process(index, own, counter.advance)
                writer.submit(self._write, index, own, contents, crew)
                for place in places:
                    results[place].parts_written += 1
        for job, result in zip(jobs, results, strict=True):
            self._finish(job.stage, mine, result, crew)
        return results

    def _write(self, index: int, jobs: Sequence[Job], contents: Sequence[Contents], crew: Workers) -> None:
        for job, content in zip(jobs, contents, strict=True):
            for output, rows in zip(job.stage.outputs, content, strict=True):
                extra = job.extra_columns if output.table.open_columns else None
                arrow = rows if isinstance(rows, pa.Table) else store.to_arrow(output.table, rows, extra)
                store.write_part(self.path, output.table, output.value, index, arrow, job.mark)
            self.manifest.event("part_written", stage=job.stage.name, part=index, worker=crew.index)

    def _finish(self, stage: Stage, mine: Sequence[int], result: StageResult, crew: Workers) -> None:
        self._remove_leftovers(stage, crew)
        self._count(stage.outputs[-1], mine, result)
        self.manifest.event(
            "stage_finished", stage=stage.name, statuses=dict(result.statuses), worker=crew.index
        )
        if not self.missing_parts(stage.name):
            self.manifest.update_stage(stage.name, finished=now(), world_size=crew.count)

    def statuses(self, name: str, parts: Sequence[int]) -> Counter[str]:
        """Items of `parts` of a stage by status; the parts must be done."""
        record = self.require(name)
        table, value = record["outputs"][-1]
        result = StageResult(name)
        self._count(Output(TABLES[table], value), parts, result)
        return result.statuses

    def _remove_leftovers(self, stage: Stage, crew: Workers) -> None:
        """Parts beyond the plan are left from an overwritten stage that had more of them."""
        if crew.index == 0:
            for output in stage.outputs:
                for index, path in store.part_paths(self.path, output.table, output.value).items():
                    if index >= stage.n_parts:
                        path.unlink()

    def _count(self, last: Output, parts: Sequence[int], result: StageResult) -> None:
        if "status" not in last.table.schema.names:
            return
        for index in parts:
            path = store.part_path(self.path, last.table, last.value, index)
            column = store.read_part(path, last.table, ["status"])["status"]
            result.statuses.update(column.to_pylist())
