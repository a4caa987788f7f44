"""After `cfkv evaluate`: evaluations in, accuracy, comparisons and lossless budgets out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import polars as pl
import pyarrow as pa

from cfkv import store
from cfkv.analysis.compare import policy_accuracy, policy_comparisons
from cfkv.analysis.lossless import lossless_budgets
from cfkv.config import OnlineConfig
from cfkv.schemas import EVALUATIONS, LOSSLESS_BUDGETS, POLICY_ACCURACY, POLICY_COMPARISONS
from cfkv.stage import Output, Run, Stage, StageResult
from cfkv.workers import Workers

OUTPUTS = (POLICY_ACCURACY, POLICY_COMPARISONS, LOSSLESS_BUDGETS)


FAMILY = "evaluate online:"


def run_compare(run: Run, config: OnlineConfig, wanted: Sequence[str], *, patient: bool) -> StageResult:
    """Compare the arms of the run; derived, so that it is made anew whenever arms or settings changed.

    Arms that are in `wanted` are waited for; others that were interrupted are left out, and named.
    """
    for name in wanted:
        run.wait_for(f"{FAMILY}{name}", patient=patient)
    recorded = sorted(name for name in run.manifest.read()["stages"] if name.startswith(FAMILY))
    upstream = tuple(name for name in recorded if not run.missing_parts(name))
    complete = [name.removeprefix(FAMILY) for name in upstream]
    names = ("level", "draws", "seed", "correction")
    stage = Stage(
        name="compare",
        config={name: getattr(config, name) for name in names},
        outputs=tuple(Output(table) for table in OUTPUTS),
        n_parts=1,
        n_items=1,
        upstream=upstream,
    )
    mark = run.open_stage(stage, overwrite=True)

    def process(index: int, advance: Callable[[int], None]) -> list[pa.Table]:
        evaluations = pl.concat([store.collect(run.path, EVALUATIONS, arm) for arm in complete])
        settings = (config.level, config.draws, config.seed)
        frames: list[pl.DataFrame] = [
            policy_accuracy(evaluations, *settings),
            policy_comparisons(evaluations, *settings, correction=config.correction),
            lossless_budgets(evaluations),
        ]
        advance(1)
        return [frame.to_arrow().cast(table.schema) for frame, table in zip(frames, OUTPUTS, strict=True)]

    result = run.execute(stage, process, Workers(), mark=mark, items_of_part=lambda index: 1)
    if unfinished := sorted(set(recorded) - set(upstream)):
        result.note = f"left out, since they were interrupted: {', '.join(unfinished)}"
    return result
