"""The runs behind the table: one trace run, and a copy of it for each row, through cfkv's own stages."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cfkv.config import Execution, LabelConfig, Recipe, TraceConfig
from cfkv.errors import CfkvError
from cfkv.session import Session

SEED = 0
CAP = 32  # tokens of a regenerated answer; the built-in model's own have 7
HORIZON = 8
ANSWER = 7  # tokens that follow the reasoning: </think>, \\boxed{, four facts, }


@dataclass(frozen=True)
class Row:
    """One line of the table: a label kind under one setting, in a run folder of its own."""

    folder: str
    setting: str
    config: LabelConfig

    @property
    def kind(self) -> str:
        """The label kind."""
        return self.config.kind


def _windows(kind: str, size: int, stride: int) -> Row:
    config = LabelConfig(kind=kind, window=size, stride=stride, max_new_tokens=CAP)
    return Row(f"{kind}-{size}-{stride}", f"windows of {size}, stride {stride}", config)


ROWS: tuple[Row, ...] = (
    *(_windows(kind, *sizes) for kind in ("occlusion", "knockout") for sizes in ((8, 4), (32, 16), (1, 1))),
    _windows("truncation", 8, 4),
    Row(
        "eviction-every-32",
        f"single tokens, a checkpoint every 32 tokens, horizon {HORIZON}",
        LabelConfig(kind="eviction_kl", every=32, horizon=HORIZON),
    ),
    Row(
        "eviction-boundary",
        f"single tokens, one checkpoint at the boundary, horizon {ANSWER} (the whole answer)",
        LabelConfig(kind="eviction_kl", steps="boundary", horizon=ANSWER),
    ),
)


def recipe(traces: int, *labels: LabelConfig) -> Recipe:
    """The built-in model on the first `traces` held-out problems of the seed."""
    trace = TraceConfig(dataset="registers", limit=traces, max_new_tokens=384, seed=SEED)
    return Recipe(trace=trace, label=labels or (LabelConfig(),))


def make(folder: Path, traces: int, rows: Sequence[Row] = ROWS, device: str = "cpu") -> None:
    """Make what is missing; the same command goes on where it stopped.

    Raises
    ------
    CfkvError
        If the folder holds runs of another number of traces, or a trace fails.
    """
    execution = Execution(device=device)
    base = folder / "traces"
    Session.open(base, recipe(traces), execution).trace()
    for row in rows:
        place = copied(base, folder / row.folder)
        result = Session.open(place, recipe(traces, row.config), execution).label(row.kind)
        if result.failed:
            raise CfkvError(
                f"{place}: {result.failed} traces were not labelled; see `reason` in its token_labels"
            )


def copied(run: Path, place: Path) -> Path:
    """`place` as a copy of a run, made once; a copy that was interrupted is made anew."""
    if not place.exists():
        unfinished = place.with_name(f".{place.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(run, unfinished)
        unfinished.rename(place)
    return place
