"""trace -> evaluate online in a run directory with the built-in model: rows, budgets, failures, re-runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from cfkv import store
from cfkv.config import Execution, LabelConfig, OnlineConfig, Recipe, TraceConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.evaluation._arms import Arm, BudgetText, arms
from cfkv.evaluation._names import parse_policy, policy_text
from cfkv.evaluation.online import derived_seed
from cfkv.policies._base import make_policy, policy_kinds
from cfkv.schemas import EVALUATIONS, KEEP_SETS, TRACES
from cfkv.session import Session

ONLINE: dict[str, Any] = {
    "policies": ("streaming_llm", "h2o", "ada_kv", "oracle"),
    "budgets": ("25%", "100%"),
    "max_new_tokens": 24,
    "keep_sets": True,
}
TRACE = TraceConfig(limit=4, part_size=2, max_new_tokens=300, seed=29)
# Columns that no two runs share.
TIMES = ("seconds",)


def session(folder: Path, online: dict[str, Any] | None = None, **execution: object) -> Session:
    recipe = Recipe(
        trace=TRACE,
        label=(LabelConfig(kind="knockout", window=16, stride=8, max_new_tokens=24),),
        online=OnlineConfig(**{**ONLINE, "label": "knockout", **(online or {})}),
    )
    return Session.open(folder, recipe, Execution(device="cpu", **execution))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online") / "run"
    session(folder).trace()
    session(folder).label("knockout")
    return folder


@pytest.fixture(scope="module")
def evaluated(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(labelled, folder)
    assert session(folder).evaluate_online().failed == 0
    return folder


@pytest.fixture
def fresh(labelled: Path, tmp_path: Path) -> Path:
    shutil.copytree(labelled, tmp_path / "run")
    return tmp_path / "run"


def rows(folder: Path) -> pl.DataFrame:
    return store.collect(folder, EVALUATIONS).sort("arm", "trace_id", "sample_index")


def same(first: Path, second: Path, *, leave: tuple[str, ...] = TIMES) -> None:
    assert rows(first).drop(leave).equals(rows(second).drop(leave))
    key = list(KEEP_SETS.key)
    mine, theirs = (store.collect(folder, KEEP_SETS).sort(key) for folder in (first, second))
    assert mine.equals(theirs)


def test_one_row_per_trace_and_arm(evaluated: Path) -> None:
    found = rows(evaluated)
    correct = store.collect(evaluated, TRACES).filter(pl.col("correct"))
    # full once; random and four policies at two budgets
    assert found["arm"].n_unique() == 1 + 5 * 2
    assert found.height == 11 * correct.height
    assert (found["status"] == "ok").all()
    full = found.filter(pl.col("policy") == "full")
    assert full.select("budget", "slots", "eviction", "evictions").unique().rows() == [
        ("all", None, "none", 0)
    ]
    assert full["correct"].all()  # the control that the labels demand too
    assert full["verdict"].unique().to_list() == ["correct"]


def test_budgets_by_hand(evaluated: Path) -> None:
    """A share is of what follows the prompt, the trace's own answer included, beside the prompt."""
    lengths = store.collect(evaluated, TRACES).select("trace_id", "prompt_len", "answer_start", "answer_stop")
    for row in rows(evaluated).join(lengths, on="trace_id").iter_rows(named=True):
        assert row["n_read"] == row["answer_start"]
        if row["budget"] == "25%":
            assert row["slots"] == row["prompt_len"] + (row["answer_stop"] - row["prompt_len"]) // 4
            assert row["kept_peak"] <= row["slots"] + 1e-3 or row["policy"] == "ada_kv"  # acts once
            assert row["evictions"] > 0
        elif row["budget"] == "100%":
            assert row["slots"] == row["answer_stop"]
            assert (row["evictions"], row["evicted"]) == (0, 0.0)
        # 2 tensors x 4 layers x 2 KV heads x 24 dimensions x 4 bytes = 1,536 bytes a slot
        if row["eviction"] == "physical" and row["policy"] != "ada_kv":
            assert row["peak_bytes"] <= 1536 * (row["slots"] + 1)
        assert (row["peak_bytes"] is None) == (row["eviction"] == "simulated")
        assert (row["eviction"] == "simulated") == (row["policy"] == "ada_kv")  # budgets per head differ


def test_at_the_whole_length_every_policy_writes_what_the_full_cache_writes(evaluated: Path) -> None:
    found = rows(evaluated)
    full = dict(found.filter(pl.col("policy") == "full").select("trace_id", "token_ids").rows())
    whole = found.filter(pl.col("budget") == "100%")
    assert whole.height == 5 * len(full)
    for trace, tokens in whole.select("trace_id", "token_ids").iter_rows():
        assert tokens == full[trace]


def test_keep_sets_hold_the_budget_and_the_protected(evaluated: Path) -> None:
    kept = store.collect(evaluated, KEEP_SETS).filter(pl.col("arm") == "forced-streaming_llm-25pct")
    slots = dict(
        rows(evaluated)
        .filter(pl.col("arm") == "forced-streaming_llm-25pct")
        .select("trace_id", "slots")
        .rows()
    )
    assert kept.height > 20
    for trace, step, positions in kept.select("trace_id", "step", "kept").iter_rows():
        # four sinks and the newest, by the method's own definition
        recent = range(step - (slots[trace] - 4), step)
        assert positions == [0, 1, 2, 3, *recent]


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 7}, {"chunk_size": 16}])
def test_batches_and_chunks_change_nothing(evaluated: Path, fresh: Path, options: dict[str, int]) -> None:
    session(fresh, **options).evaluate_online()
    same(evaluated, fresh, leave=("seconds", "min_margin"))
    gap = (rows(evaluated)["min_margin"] - rows(fresh)["min_margin"]).abs().max()
    print(f"{options}: largest difference of a margin {gap:.1e}")
    assert gap < 1e-4  # type: ignore[operator]


def test_shards_and_reruns(evaluated: Path, fresh: Path) -> None:
    for shard in ("1/2", "0/2"):
        assert session(fresh, shard=shard).evaluate_online().failed == 0
    same(evaluated, fresh)
    part = store.part_path(fresh, EVALUATIONS, "forced-h2o-25pct", 1)
    untouched = store.part_path(fresh, EVALUATIONS, "forced-h2o-25pct", 0).stat().st_mtime_ns
    part.write_bytes(part.read_bytes()[:100])
    result = session(fresh).evaluate_online()
    assert result.parts_written == 1
    same(evaluated, fresh, leave=("seconds", "min_margin"))  # the arm was alone this time
    assert store.part_path(fresh, EVALUATIONS, "forced-h2o-25pct", 0).stat().st_mtime_ns == untouched


def test_more_policies_and_budgets_join_a_run(evaluated: Path, tmp_path: Path) -> None:
    shutil.copytree(evaluated, tmp_path / "run")
    result = session(tmp_path / "run", {"policies": ("tova",), "budgets": ("64",)}).evaluate_online()
    found = rows(tmp_path / "run")
    assert set(found["arm"]) - set(rows(evaluated)["arm"]) == {"forced-tova-64", "forced-random-64"}
    assert found.filter(pl.col("arm") == "forced-tova-64")["slots"].unique().to_list() == [64]
    assert result.parts_found == 2  # the full cache
    with pytest.raises(CfkvError, match=r"online\.max_new_tokens: 24 -> 30"):
        session(tmp_path / "run", {"max_new_tokens": 30}).evaluate_online()


def test_free_mode_writes_the_trace_again_under_the_full_cache(fresh: Path) -> None:
    options = {"mode": "free", "policies": ("streaming_llm",), "budgets": ("100%",), "max_new_tokens": 300}
    session(fresh, options).evaluate_online()
    traces = store.collect(fresh, TRACES).select("trace_id", "token_ids", "prompt_len", "correct")
    found = rows(fresh).join(traces, on="trace_id", suffix="_trace")
    assert found.height == 3 * traces.height  # all traces, not the correct ones alone
    for row in found.filter(pl.col("policy") != "random").iter_rows(named=True):
        assert row["token_ids"] == row["token_ids_trace"][row["prompt_len"] :]
        assert row["correct"] == row["correct_trace"]
        assert row["n_read"] == row["prompt_len"]


def test_samples_have_seeds_of_their_own(fresh: Path) -> None:
    options = {"policies": ("streaming_llm",), "budgets": ("50%",), "samples": 3, "temperature": 2.0}
    session(fresh, options).evaluate_online()
    found = rows(fresh)
    full = found.filter(pl.col("policy") == "full")
    assert full.group_by("trace_id").len()["len"].to_list() == [3] * full["trace_id"].n_unique()
    assert full.group_by("trace_id").agg(pl.col("token_ids").n_unique())["token_ids"].max() > 1  # type: ignore[operator]


def test_a_budget_below_what_is_protected_is_a_row_that_names_both(fresh: Path) -> None:
    result = session(fresh, {"policies": ("streaming_llm",), "budgets": ("30",)}).evaluate_online()
    found = rows(fresh).filter(pl.col("arm") == "forced-random-30")
    assert found["status"].unique().to_list() == ["budget_too_small"]
    prompt = dict(store.collect(fresh, TRACES).select("trace_id", "prompt_len").rows())[found["trace_id"][0]]
    assert (
        f"30 tokens is not above the {prompt} that are protected (of {prompt} cached)" in found["reason"][0]
    )
    assert result.failed == found.height
    assert found["correct"].null_count() == found.height


def test_a_policy_that_never_evicts_fails(fresh: Path) -> None:
    session(fresh, {"policies": ("r_kv:every=4096",), "budgets": ("90",)}).evaluate_online()
    found = rows(fresh).filter(pl.col("policy") == "r_kv")
    assert found["status"].unique().to_list() == ["never_evicted"]
    assert "acts every 4096 steps" in found["reason"][0]


def test_label_policies_need_the_label(fresh: Path) -> None:
    with pytest.raises(
        CfkvError, match=r"policies oracle are made from labels of kind 'occlusion'.*cfkv label"
    ):
        session(fresh, {"label": "occlusion"}).evaluate_online()


@pytest.mark.parametrize(
    ("online", "message"),
    [
        ({"policies": ("h20",)}, "unknown policy 'h20': did you mean 'h2o'"),
        (
            {"policies": ("h2o:recent=1",)},
            "unknown parameter of policy h2o 'recent': did you mean 'recent_share'",
        ),
        ({"policies": ("h2o:recent_share",)}, "'recent_share' is no parameter=value"),
        ({"policies": ("h2o:recent_share=2",)}, "policy h2o: recent_share = 2: Input should be less than 1"),
        ({"budgets": ("half",)}, "budget 'half' is not understood; legal: 512"),
        ({"budgets": ("120%",)}, "budget '120%' is not understood"),
        ({"budgets": ()}, "no budget given"),
    ],
)
def test_messages(online: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before anything is loaded or run."""
    with pytest.raises(CfkvError) as caught:
        session(tmp_path / "none", online).check_names(["evaluate online"])
    assert message in str(caught.value)


def test_budget_texts_by_hand() -> None:
    lengths = {"prompt_len": 100, "total": 300, "bytes_per_token": 1000}
    cases = {
        "64": 64,
        "25%": 150,
        "12.5%": 125,
        "100%": 300,
        "50%prompt": 50,
        "29%": 158,
        "1MiB": 1048,
        "2500B": 2,
    }
    found = {text: BudgetText(text).resolve(**lengths).slots for text in cases}
    assert found == cases
    with pytest.raises(CfkvError, match="holds no token: one takes 1000 bytes"):
        BudgetText("999B").resolve(**lengths)
    with pytest.raises(ItemError, match="budget_too_small"):
        BudgetText("0.1%prompt").resolve(**lengths)


def test_every_policy_has_a_text_that_makes_it_again() -> None:
    for name in policy_kinds.names():
        assert policy_text(make_policy(name)) == name
    text = "thinkv_original:ladder=[8, 6, 4];segment=16"
    assert policy_text(make_policy(*parse_policy(text))) == text
    config = OnlineConfig(policies=("h2o,thinkv_original:ladder=[8, 6, 4];segment=16",), budgets=("8",))
    assert [arm.text for arm in arms(config)] == ["full", "random", "h2o", text]
    assert Arm(make_policy("h2o"), "forced", "slot", BudgetText("25%")).name == "forced-h2o-25pct-slot"
    assert arms(config)[-1].name == "forced-thinkv_original@ladder=(8,6,4)+segment=16-8"


def test_seeds_depend_on_both() -> None:
    assert len({derived_seed(seed, text) for seed in (0, 1) for text in ("a", "b")}) == 4
    assert derived_seed(0, "a") == derived_seed(0, "a") < 2**31
