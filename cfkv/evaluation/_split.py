"""What was chosen on one run's problems is judged on others: the check that no problem is in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cfkv import store
from cfkv.errors import CfkvError
from cfkv.schemas import TRACES
from cfkv.stage import Run

SHAPING = ("mode", "instruction")  # what of a trace's configuration is in its prompt


class OtherProblems:
    """The problems of other runs, on which something (`chosen`) was chosen: none of them may be evaluated.

    The same id of the same dataset is the same problem, unless both runs made their prompts in the same way and the
    prompts differ (another seed, another file). The same prompt is the same problem whatever its id.
    """

    def __init__(self, run: Run, places: Iterable[str], chosen: str) -> None:
        self.run, self.chosen = run, chosen
        self.others = {place: _Problems(Run(Path(place).expanduser())) for place in places}

    def check(self, rows: Iterable[Mapping[str, Any]] | None = None) -> None:
        """Raise CfkvError if one of these traces (default: all that are there) is of such a problem."""
        if not self.others:
            return
        mine = _Problems(self.run) if rows is None else _Problems(self.run, rows)
        for place, theirs in self.others.items():
            shared = mine.shared_with(theirs)
            if shared:
                dataset, problem = shared[0]
                raise CfkvError(
                    f"{len(shared)} of {len(mine.by_id)} problems of {self.run.path} are problems of {place} too, such "
                    f"as {problem} of {dataset}; {self.chosen} of one run must be judged on other problems: trace "
                    "another split for one of them (--limit with another file, or another --seed of generated problems)"
                )


class _Problems:
    """Problems of a run by (dataset, id), each with its prompts."""

    def __init__(self, run: Run, rows: Iterable[Mapping[str, Any]] | None = None) -> None:
        config = run.require("trace")["identity"]["config"]
        self.shaping = (config["model"], [config["trace"].get(name) for name in SHAPING])
        if rows is None:
            names = ("dataset", "problem_id", "token_ids", "prompt_len")
            rows = store.collect(run.path, TRACES).select(names).iter_rows(named=True)
        self.by_id: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        for row in rows:
            prompts = self.by_id.setdefault((row["dataset"], row["problem_id"]), set())
            if row["token_ids"] and row["prompt_len"]:
                prompts.add(tuple(row["token_ids"][: row["prompt_len"]]))

    def shared_with(self, other: _Problems) -> list[tuple[str, str]]:
        """Those of these problems that the other run has too."""
        theirs = set().union(*other.by_id.values())
        comparable = self.shaping == other.shaping
        found = []
        for name, prompts in sorted(self.by_id.items()):
            namesake = other.by_id.get(name)
            differ = comparable and prompts and namesake
            if prompts & theirs or (namesake is not None and not differ):
                found.append(name)
        return found
