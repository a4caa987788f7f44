"""A stage without a model, for the tests of the driver; run as a script, it kills itself at a given moment.

python tests/toy_stage.py RUN item 5      SIGKILL while the 5th item is processed
python tests/toy_stage.py RUN rename 2    SIGKILL when the 2nd part is written but has not got its name
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from cfkv import store
from cfkv.schemas import PROBED, SIGNALS, TRACES
from cfkv.stage import Output, Rows, Run, Stage, StageResult
from cfkv.workers import Workers

ITEMS, PART_SIZE = 10, 3  # parts of 3, 3, 3 and 1 items
OUTPUTS = (Output(SIGNALS, "toy"), Output(PROBED, "toy"))
COLUMNS = pa.schema([pa.field("toy", pa.list_(pa.float32()))])


def toy_stage(items: int = ITEMS, size: int = PART_SIZE, factor: float = 1.0, **fields: Any) -> Stage:
    """The stage `probe:toy`: two outputs per part, as the real probe has."""
    defaults: dict[str, Any] = {
        "name": "probe:toy",
        "config": {"factor": factor, "items": items, "size": size},
        "outputs": OUTPUTS,
        "n_parts": -(-items // size),
        "n_items": items,
    }
    return Stage(**{**defaults, **fields})


def run_toy(
    path: Path,
    stage: Stage | None = None,
    crew: Workers | None = None,
    *,
    overwrite: bool = False,
    on_item: Callable[[int], None] = lambda item: None,
    statuses: Mapping[int, str] | None = None,
) -> StageResult:
    """Run the toy stage; item i has signals [i * factor, layer + .5] on two layers, and i + 1 tokens."""
    stage = stage or toy_stage()
    config, run = stage.config, Run(path)
    mark = run.open_stage(stage, overwrite=overwrite)

    def items_of(index: int) -> range:
        return range(config["items"])[index * config["size"] : (index + 1) * config["size"]]

    def process(index: int, advance: Callable[[int], None]) -> list[Rows]:
        signals: list[Any] = []
        status: list[Any] = []
        for item in items_of(index):
            on_item(item)
            name, values = f"t{item:02}", [item * config["factor"]]
            signals += [
                {"trace_id": name, "layer": layer, "kv_head": -1, "toy": [*values, layer + 0.5]}
                for layer in (0, 1)
            ]
            ended = (statuses or {}).get(item, "ok")
            status.append({"trace_id": name, "group": "toy", "n_tokens": item + 1, "status": ended})
            advance(1)
        return [signals, status]

    return run.execute(
        stage,
        process,
        crew or Workers(),
        mark=mark,
        items_of_part=lambda index: len(items_of(index)),
        extra_columns=COLUMNS,
    )


def run_traces(path: Path, *, overwrite: bool = False, seed: int = 0) -> StageResult:
    """A stage `trace` of one part and one trace, to be upstream of another."""
    stage = Stage(name="trace", config={"seed": seed}, outputs=(Output(TRACES),), n_parts=1, n_items=1)
    run = Run(path)
    mark = run.open_stage(stage, overwrite=overwrite)
    rows = [{"trace_id": f"t{seed}", "status": "ok"}]
    return run.execute(
        stage, lambda index, advance: [rows], Workers(), mark=mark, items_of_part=lambda index: 1
    )


def parts(path: Path) -> dict[str, bytes]:
    """Every file under the tables of a run, by its place."""
    files = [file for table in (SIGNALS, PROBED) for file in (path / table.name).rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(files)}


def rows(path: Path) -> list[dict[str, Any]]:
    """Every row of both tables, in the order of the parts."""
    return [row for o in OUTPUTS for row in store.scan(path, o.table, o.value).collect().to_dicts()]


def kill_self() -> None:
    """As the out-of-memory killer does it: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: str, when: str, count: str) -> None:
    """Run the toy stage and die at the `count`-th item or rename of a part."""
    left = int(count)

    def tick(_: Any = None) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            kill_self()

    if when == "rename":
        replace = Path.replace

        def dying(source: Path, target: Path) -> Path:
            if store.PART.fullmatch(target.name):
                tick()
            return replace(source, target)

        Path.replace = dying  # type: ignore[method-assign,assignment]
    run_toy(Path(path), on_item=tick if when == "item" else lambda item: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
