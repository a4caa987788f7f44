"""After both ways to judge: validity_summary and policy_accuracy in, rows of offline_online out."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pyarrow as pa
from rich import box
from rich.table import Table

from cfkv import store
from cfkv.analysis.carryover import offline_online
from cfkv.analysis.compare import SIGNIFICANCE
from cfkv.config import OnlineConfig
from cfkv.errors import CfkvError
from cfkv.schemas import OFFLINE_ONLINE, POLICY_ACCURACY, VALIDITY_SUMMARY
from cfkv.stage import Output, Run, Stage, StageResult
from cfkv.workers import Workers

NAME, UPSTREAM = "carryover", ("validity", "compare")
# Drawing more changes no digit that is printed, and Kendall's permutations take their time.
MOST_DRAWS = 2000
# Measures that a person is shown; the table has all.
SHOWN = ("rho", "auroc", "average_precision", "recall 25%", "regret 25%")


def possible(run: Run) -> bool:
    """Whether policies of the run were judged both ways, on the labels and traces of now."""
    try:
        return all(run.manifest.stage(name) is not None and not run.missing_parts(name) for name in UPSTREAM)
    except CfkvError:  # one of the two was made from what has changed since
        return False


def run_carryover(run: Run, config: OnlineConfig) -> StageResult:
    """Correlate each offline measure with accuracy over the policies that have both; made anew without asking."""
    draws = min(config.draws, MOST_DRAWS)
    stage = Stage(
        name=NAME,
        config={"level": config.level, "draws": draws, "seed": config.seed},
        outputs=(Output(OFFLINE_ONLINE),),
        n_parts=1,
        n_items=1,
        upstream=UPSTREAM,
    )
    mark = run.open_stage(stage, overwrite=True)

    def process(index: int, advance: Callable[[int], None]) -> list[pa.Table]:
        frame = offline_online(
            measured(store.collect(run.path, VALIDITY_SUMMARY)),
            store.collect(run.path, POLICY_ACCURACY),
            config.level,
            draws,
            config.seed,
        )
        advance(1)
        return [frame.to_arrow().cast(OFFLINE_ONLINE.schema)]

    return run.execute(stage, process, Workers(), mark=mark, items_of_part=lambda index: 1)


def measured(summary: pl.DataFrame) -> pl.DataFrame:
    """Columns policy, parameters, measure (such as `knockout end recall 25%`) and value, one row per policy."""
    share = pl.format(" {}%", (100 * pl.col("share")).round(3).cast(pl.String).str.strip_suffix(".0"))
    return summary.filter(pl.col("versus").is_null()).select(
        policy=pl.col("policy").str.split(":").list.first(),
        parameters=pl.col("policy").str.splitn(":", 2).struct.field("field_1").fill_null(""),
        measure=pl.format("{} {} {}", "kind", "checkpoint", "measure") + share.fill_null(""),
        value="estimate",
    )


def carryover_table(frame: pl.DataFrame) -> Table:
    """Spearman's rho over policies of each offline measure with accuracy, by budget.

    Parameters
    ----------
    frame : DataFrame
        The table `offline_online`. Policies made from labels are left out.
    """
    rows = frame.filter((pl.col("statistic") == "spearman") & (pl.col("policies") == "without_excluded"))
    level = 100 * float(frame["level"][0]) if frame.height else 95.0
    shown = pl.any_horizontal(pl.col("measure").str.ends_with(f" {name}") for name in SHOWN)
    rows = rows.filter(shown)
    budgets = rows.select("mode", "budget").unique(maintain_order=True).rows()
    most = max(rows["n_policies"].to_list(), default=0)
    table = Table(
        title="Does validity offline carry over to accuracy online?",
        caption=f"Spearman over policies not made from labels (up to {most}), with {level:g} % bootstrap intervals "
        f"over policies; * adjusted p below {SIGNIFICANCE:g} (Benjamini-Hochberg). Everything else is not significant. "
        "A regret should be negative.",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("offline measure", no_wrap=True)
    for mode, budget in budgets:
        table.add_column(f"{budget}\n{mode}", justify="right")
    for measure in rows["measure"].unique(maintain_order=True):
        found = {
            (row["mode"], row["budget"]): _cell(row)
            for row in rows.filter(pl.col("measure") == measure).iter_rows(named=True)
        }
        table.add_row(measure, *(found.get(place, "") for place in budgets))
    return table


def _cell(row: dict[str, float]) -> str:
    if row["estimate"] != row["estimate"]:
        return "–"
    star = "*" if row["adjusted_pvalue"] < SIGNIFICANCE else " "
    return f"{row['estimate']:+.2f}{star}\n[{row['low']:+.2f}, {row['high']:+.2f}]"
