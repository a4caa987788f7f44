"""In bfloat16 rounding flips windows: fast against literal labels, counted by margin and by the null floor.

    python -m pipelines.bf16_check RUN_FOLDER --model builtin --traces 30
    python -m pipelines.bf16_check RUN_FOLDER --model smollm2 --path gsm8k_test.jsonl --traces 10

Makes (or resumes) two runs from the same traces, one by the fast replay and one by `--literal`, each with occlusion and
null windows of 8 tokens, and writes data/benchmarks/DTYPE_MODEL.json. Run from the repository root.

A narrow margin is necessary for a difference, not a sign of one: in bfloat16 most windows of a small model have a token
whose two best logits are within four spacings. What counts is `flips_differ`, and that none is unexplained. The literal
null windows repeat the control's own sums, so that their floor is 0; the floor used here is that of the fast run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import polars as pl

from cfkv import __version__
from cfkv.analysis.floor import count_flips, count_under_floor
from cfkv.config import Execution, LabelConfig, ModelConfig, Recipe, TraceConfig
from cfkv.loader import load
from cfkv.margins import narrow_margin
from cfkv.session import Session
from pipelines.truth_table.runs import copied

OUT = Path(__file__).resolve().parents[1] / "data" / "benchmarks"
KINDS, CAP = ("occlusion", "null"), 32
KEY = ["trace_id", "kind", "scope", "window_index"]


def recipe(model: str, dtype: str, traces: int, path: Path | None) -> Recipe:
    """Registers for the built-in model, GSM8K worked solutions for any other."""
    if model == "builtin":
        trace = TraceConfig(dataset="registers", limit=traces, max_new_tokens=384)
    else:
        trace = TraceConfig(
            dataset="gsm8k",
            path=path,
            mode="worked_solution",
            limit=traces,
            min_reasoning=40,
            answer_max_new_tokens=CAP,
        )
    labels = tuple(LabelConfig(kind=kind, window=8, stride=4, max_new_tokens=CAP) for kind in KINDS)
    return Recipe(model=ModelConfig(model=model, dtype=dtype), trace=trace, label=labels)


def make(folder: Path, plan: Recipe, device: str = "cpu") -> tuple[Path, Path]:
    """The two runs, whatever is missing of them made."""
    base = folder / "traces"
    Session.open(base, plan, Execution(device=device)).trace()
    places = copied(base, folder / "fast"), copied(base, folder / "literal")
    for place, literal in zip(places, (False, True), strict=True):
        session = Session.open(place, plan, Execution(device=device, literal=literal))
        for kind in KINDS:
            session.label(kind)
    return places


def compare(fast: Path, literal: Path, dtype: str) -> dict[str, Any]:
    """Counts over both runs: what differs, and what of it a narrow margin or the null floor of its trace explains."""
    bound = narrow_margin(dtype)
    mine, theirs = (load(run).windows.collect() for run in (fast, literal))
    labels = [load(run).token_labels.collect() for run in (fast, literal)]
    both = mine.join(theirs, on=KEY, suffix="_literal")
    floors = (
        mine.filter(pl.col("kind") == "null")
        .group_by("trace_id")
        .agg(floor=pl.col("delta_nll").abs().max(), null_flipped=pl.col("flipped").any())
    )
    held = both.join(floors, on="trace_id", how="left").with_columns(
        narrow=pl.min_horizontal("min_margin", "min_margin_literal") < bound,
        within=pl.min_horizontal(pl.col("delta_nll").abs(), pl.col("delta_nll_literal").abs())
        <= pl.col("floor"),
        same=pl.col("answer").eq_missing(pl.col("answer_literal")),
    )
    found: dict[str, Any] = {"narrow_margin": bound}
    for kind in KINDS:
        rows = held.filter(pl.col("kind") == kind)
        found[kind] = _counts(rows) | {
            "excluded_by_control": [_excluded(each, kind) for each in labels],
            "in_one_run_only": mine.filter(pl.col("kind") == kind).height
            + theirs.filter(pl.col("kind") == kind).height
            - 2 * rows.height,
        }
    found["occlusion"] |= {
        "within_null_floor": [_first(count_under_floor(each, "occlusion")) for each in (mine, theirs)],
        "flipped_within_null_floor": [
            _first(count_under_floor(each, "occlusion", flipped=True)) for each in (mine, theirs)
        ],
    }
    found["null_windows_flipped"] = [count_flips(each, "null")[0] for each in (mine, theirs)]
    return found


def _counts(rows: pl.DataFrame) -> dict[str, Any]:
    """Of one kind; pairs are fast, literal."""
    differ = rows.filter(pl.col("flipped") != pl.col("flipped_literal"))
    excused = pl.col("narrow") | pl.col("within").fill_null(value=False)
    same = rows.filter("same")
    return {
        "windows": rows.height,
        "flipped": [int(rows[name].sum()) for name in ("flipped", "flipped_literal")],
        "decided_by_a_narrow_margin": int(rows["narrow"].sum()),
        "answers_differ": rows.height - same.height,
        "flips_differ": differ.height,
        "flips_differ_narrow": int(differ["narrow"].sum()),
        "flips_differ_within_null_floor": int(differ["within"].sum()),
        "flips_differ_unexplained": differ.filter(~excused).height,
        "widest_margin_where_answers_differ": _largest(
            rows.filter(~pl.col("same")), pl.min_horizontal("min_margin", "min_margin_literal")
        ),
        "largest_margin_difference": _largest(same, pl.col("min_margin") - pl.col("min_margin_literal")),
        "largest_delta_nll_difference": _largest(rows, pl.col("delta_nll") - pl.col("delta_nll_literal")),
    }


def _largest(rows: pl.DataFrame, what: pl.Expr) -> float | None:
    found = rows.select(what.abs().max()).item() if rows.height else None
    return None if found is None else float(f"{found:.3g}")


def _first(pair: tuple[int, int] | None) -> int | None:
    return None if pair is None else pair[0]


def _excluded(labels: pl.DataFrame, kind: str) -> int:
    return labels.filter(pl.col("kind") == kind, pl.col("status") == "excluded").height


def main() -> None:
    """Make, compare, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the runs are; the same command continues there")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--path", type=Path, help="GSM8K file, for another model than builtin")
    parser.add_argument("--traces", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    fast, literal = make(
        given.folder, recipe(given.model, given.dtype, given.traces, given.path), given.device
    )
    made = load(fast).traces.collect()
    content = {
        "command": f"python -m pipelines.bf16_check RUN_FOLDER --model {given.model} --dtype {given.dtype} "
        f"--traces {given.traces}" + (f" --path {given.path.name}" if given.path else ""),
        "pairs": "[fast, literal]",
        "model": given.model,
        "dtype": given.dtype,
        "device": given.device,
        "cfkv": __version__,
        "traces": made.height,
        "correct": int(made["correct"].sum()),
        **compare(fast, literal, given.dtype),
    }
    text = json.dumps(content, indent=1)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{given.dtype}_{Path(given.model).name}.json"
    file.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
