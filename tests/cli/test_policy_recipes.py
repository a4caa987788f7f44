"""`cfkv run` of a recipe with policies, and what its dry run says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_runs import tables

from cfkv import store
from cfkv.cli import _guarded
from cfkv.config import Recipe, apply_settings, load_recipe
from cfkv.evaluation._arms import arms
from cfkv.report.card import HOLDS, dataset_card
from cfkv.schemas import (
    EVALUATIONS,
    KEEP_SETS,
    LOSSLESS_BUDGETS,
    POLICY_ACCURACY,
    POLICY_COMPARISONS,
    TRACES,
)

ROOT = Path(__file__).resolve().parents[2]
RECIPE: dict[str, Any] = {
    "trace": {"limit": 3, "max_new_tokens": 384, "part_size": 2, "seed": 29},
    "label": [{"kind": "knockout", "window": 16, "stride": 8, "max_new_tokens": 24}],
    "probe": {"groups": ["position"]},
    "correlate": {"draws": 100, "smoothings": ["raw"]},
    "online": {
        "policies": ["streaming_llm", "oracle", "epikv:early=[0, 1];late=[3]"],
        "budgets": ["50%"],
        "label": "knockout",
        "max_new_tokens": 24,
        "keep_sets": True,
        "draws": 100,
    },
}


def recipe_file(folder: Path, **changes: Any) -> str:
    path = folder / "small.yaml"
    content = {name: value for name, value in {**RECIPE, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    assert _guarded(["run", recipe_file(folder), str(folder / "run")]) == 0
    return folder / "run"


def test_a_recipe_with_policies_runs_them_before_the_report(whole: Path) -> None:
    """Full, random and three more, on the correct traces; the report has their section."""
    found, correct = store.collect(whole, EVALUATIONS), store.collect(whole, TRACES).filter("correct")
    assert set(found["policy"]) == {"full", "random", "streaming_llm", "oracle", "epikv"}
    assert found.height == 5 * correct.height > 0
    assert store.collect(whole, POLICY_ACCURACY).height == 5
    assert "streaming_llm" in (whole / "report.html").read_text(encoding="utf-8")


def test_a_run_with_policies_is_a_dataset(whole: Path, tmp_path: Path) -> None:
    """The folders of arms have characters such as @, = and parentheses; `datasets.load_dataset` reads through them."""
    datasets = pytest.importorskip("datasets")
    for table in (EVALUATIONS, KEEP_SETS, POLICY_ACCURACY, POLICY_COMPARISONS, LOSSLESS_BUDGETS):
        loaded = datasets.load_dataset(str(whole), table.name, split="train", cache_dir=str(tmp_path))
        mine = store.collect(whole, table)
        assert loaded.num_rows == mine.height > 0
        assert loaded.column_names == mine.columns
        if "arm" in mine.columns:
            assert set(loaded["arm"]) == set(mine["arm"])
            assert "forced-epikv@early=(0,1)+late=(3)-50pct" in set(loaded["arm"])


def test_the_card_says_what_the_tables_hold_and_leaves_out_empty_ones(whole: Path, tmp_path: Path) -> None:
    """Keep sets that nobody asked for are parts without rows, on which `load_dataset` would end."""
    card = (whole / "README.md").read_text(encoding="utf-8")
    assert "- `keep_sets`: one row per trace_id, arm, sample_index, layer, kv_head, step; positions" in card
    assert set(HOLDS) - {"offline_online"} <= {line.partition("`: ")[0][3:] for line in card.splitlines()}
    shutil.copytree(whole, tmp_path / "run")
    empty = KEEP_SETS.schema.empty_table()
    for arm in store.partition_values(whole, KEEP_SETS):
        for part in store.part_paths(whole, KEEP_SETS, arm):
            store.write_part(tmp_path / "run", KEEP_SETS, arm, part, empty, "mark")
    again = dataset_card(tmp_path / "run", {}, store.collect(whole, TRACES))
    assert "keep_sets" not in again
    assert "- config_name: evaluations" in again


def test_a_recipe_without_policies_runs_none(tmp_path: Path) -> None:
    """Neither by itself nor once something else is set."""
    recipe = recipe_file(tmp_path, online=None)
    assert _guarded(["run", recipe, str(tmp_path / "run"), "--set", "trace.limit=2"]) == 0
    assert (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "evaluations").exists()


def test_setting_a_section_names_it() -> None:
    assert apply_settings(Recipe(), ["trace.limit=2"]).model_fields_set == {"trace"}
    policies = apply_settings(Recipe(), ["online.budgets=[64, 25%]"])
    assert policies.model_fields_set == {"online"}
    assert policies.online.budgets == ("64", "25%")


def test_shards_leave_the_comparison_to_the_last(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = recipe_file(tmp_path), tmp_path / "run"
    assert _guarded(["run", recipe, str(run), "--shard", "1/2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"`cfkv evaluate online {run}` and `cfkv correlate {run}` and `cfkv report {run}`" in printed
    assert not (run / "policy_accuracy").exists()
    assert not (run / "report.html").exists()
    assert _guarded(["run", recipe, str(run), "--shard", "0/2"]) == 0
    assert (run / "report.html").exists()
    mine, theirs = tables(run), tables(whole)
    timed = {"evaluations": ("seconds",), "policy_accuracy": ("seconds_per_token",)}
    for name in mine:
        assert mine[name].drop(timed.get(name, ())).equals(theirs[name].drop(timed.get(name, ()))), name


def test_labels_of_oracles_are_asked_for_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    online = {**RECIPE["online"], "label": "occlusion"}
    assert _guarded(["run", recipe_file(tmp_path, online=online), str(tmp_path / "run")]) == 2
    assert "policies oracle are made from labels of kind 'occlusion'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_arms_by_hand(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 traces x 5 arms x 2 samples are 30 items; each row of a part is as long as the part's longest trace and cap."""
    before = sorted(whole.rglob("*"))
    arguments = [
        "evaluate",
        "online",
        str(whole),
        "--samples",
        "2",
        "--max-new-tokens",
        "20",
        "--batch-size",
        "8",
    ]
    assert _guarded([*arguments, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert sorted(whole.rglob("*")) == before
    traces = store.collect(whole, TRACES)
    fed = (traces["answer_start"] - traces["prompt_len"]).to_list()
    # Two parts: traces 0 and 1, trace 2. Groups of ceil(2 x 8 / (5 x 2)) = 2 traces: 3 batches of 8, then 2.
    steps = [max(fed[:2]) + 20, fed[2] + 20]
    # The prompt is read for policies that act while decoding, the whole text for the full cache; chunks of 512.
    read = 2 * sum(traces["prompt_len"].to_list()) + sum(fed)
    assert f"<= {30:,} " in printed
    assert f"<= {3 * steps[0] + 2 * steps[1] + 6:,} " in printed
    assert f"<= {20 * steps[0] + 10 * steps[1] + read:,} " in printed
    assert "evaluate online, 5 arms" in printed


def test_a_dry_run_of_a_recipe_lists_policies_after_the_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _guarded(["run", recipe_file(tmp_path), str(tmp_path / "run"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("probe:position") < printed.index("evaluate online, 5")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["policies_builtin", "policies_gsm8k_smollm2"])
def test_the_recipes_of_the_evidence_name_policies_and_their_labels(name: str) -> None:
    recipe = load_recipe(ROOT / "pipelines" / f"{name}.yaml")
    assert "online" in recipe.model_fields_set
    assert recipe.online.label in {config.kind for config in recipe.label}
    assert len(arms(recipe.online)) > 30


def test_the_gsm8k_recipe_has_the_traces_of_the_other_and_some_more() -> None:
    with_policies, without = (
        load_recipe(ROOT / "pipelines" / f"{name}.yaml")
        for name in ("policies_gsm8k_smollm2", "gsm8k_smollm2")
    )
    for section in ("model", "probe"):
        assert getattr(with_policies, section) == getattr(without, section)
    limit = with_policies.trace.limit
    assert with_policies.trace == without.trace.model_copy(update={"limit": limit})
    assert limit is not None
    assert limit > (without.trace.limit or 0)
    # The evidence judges the same policies both ways.
    assert with_policies.offline.policies == with_policies.online.policies
