"""`cfkv evaluate offline` on the built-in model: values by hand, both sources, re-runs, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.stats import spearmanr

import cfkv
from cfkv.analysis.association import auroc
from cfkv.cli import _guarded
from cfkv.config import OfflineConfig, parse_recipe
from cfkv.errors import CfkvError
from cfkv.evaluation import _validity, offline
from cfkv.evaluation._names import named_policies, parse_policy, policy_text, scoring_policies
from cfkv.models import compat
from cfkv.policies._base import make_policy
from cfkv.policies._draws import uniform
from cfkv.session import Session

STORED = ("kv_key", "kv_val", "epikv", "epikv_rolling_mean", "epikv_ema_slow")
READ = ("h2o", "snapkv", "keydiff", "segment_hybrid_keys")
MADE_OF_LABELS = ("oracle", "anti_oracle", "shuffled_oracle")
Refused = Callable[..., str]


def flags(*policies: str) -> list[str]:
    return [word for policy in policies for word in ("--policies", policy)]


def evaluate(run: Path, *arguments: str) -> int:
    return _guarded(["evaluate", "offline", str(run), "--draws", "200", *arguments])


def table(run: Path, name: str = "policy_validity") -> pl.DataFrame:
    frame: pl.DataFrame = getattr(cfkv.load(run), name).collect()
    return frame.sort(frame.columns)


def values(frame: pl.DataFrame, policy: str, measure: str, kind: str = "occlusion") -> list[float]:
    own = frame.filter(policy=policy, measure=measure, kind=kind, checkpoint="end")
    return own.sort("trace_id", "share")["value"].to_list()


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight traces in four parts with two kinds of labels; no signals."""
    run = str(tmp_path_factory.mktemp("labelled") / "run")
    assert _guarded(["trace", run, "--limit", "8", "--max-new-tokens", "384", "--part-size", "2"]) == 0
    assert _guarded(["label", run, "--window", "8", "--stride", "4", "--max-new-tokens", "16"]) == 0
    assert _guarded(["label", run, "--kind", "eviction_kl", "--every", "64"]) == 0
    return Path(run)


@pytest.fixture(scope="module")
def judged(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it read with the model."""
    run = tmp_path_factory.mktemp("judged") / "run"
    shutil.copytree(labelled, run)
    asked = flags(*STORED, *READ, *MADE_OF_LABELS, "knorm", "streaming_llm", "h2o:recent_share=0.25")
    assert evaluate(run, *asked, "--checkpoints", "50%,end") == 0
    return run


@pytest.fixture
def copied(labelled: Path, tmp_path: Path) -> Path:
    shutil.copytree(labelled, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the command, which must be refused; the message."""

    def attempt(*arguments: str) -> str:
        capsys.readouterr()
        assert evaluate(copied, *arguments) == 2
        return capsys.readouterr().err

    return attempt


def test_policies_made_from_labels(judged: Path) -> None:
    """The oracle is right, its opposite wrong, a shuffled one no better than chance, for either kind of label."""
    frame = table(judged)
    for kind in ("occlusion", "eviction_kl"):
        areas = {policy: values(frame, policy, "auroc", kind) for policy in MADE_OF_LABELS}
        assert len(areas["oracle"]) >= 6
        assert set(areas["oracle"]) == {1.0}
        assert set(areas["anti_oracle"]) == {0.0}
        assert abs(np.mean(areas["shuffled_oracle"]) - 0.5) < 0.12
        assert set(values(frame, "oracle", "regret", kind)) == {0.0}
        assert set(values(frame, "oracle", "overlap", kind)) == {1.0}
        assert max(values(frame, "anti_oracle", "recall", kind)) < 1
    assert np.allclose(values(frame, "oracle", "rho_value", "eviction_kl"), 1)


def test_controls_by_hand(judged: Path) -> None:
    """position and random from the tables alone: AUROC, rho and counts of each trace."""
    run = cfkv.load(judged)
    labels = run.token_labels.filter(kind="occlusion", status="labelled").collect()
    ends = dict(run.traces.select("trace_id", "answer_start").collect().rows())
    frame = table(judged).filter(kind="occlusion", checkpoint="end")
    for trace_id, importance in labels.select("trace_id", "importance").iter_rows():
        label = np.array(importance)[: ends[trace_id]]
        tested = np.flatnonzero(label >= 0)
        own = frame.filter(trace_id=trace_id)
        assert set(own["step"]) == {ends[trace_id]}
        assert set(own["n_candidates"]) == {tested.size}
        assert set(own["n_important"]) == {int((label == 1).sum())}
        drawn = uniform(torch.from_numpy(tested), _validity.trace_seed(0, trace_id)).numpy()
        for policy, score in (("position", tested), ("random", drawn)):
            plain = own.filter(pl.col("policy") == policy, pl.col("share").is_null())
            shown = dict(plain.select("measure", "value").rows())
            assert shown["auroc"] == pytest.approx(auroc(score, label[tested] == 1))
            assert shown["rho"] == pytest.approx(spearmanr(score, label[tested] == 1)[0])


def test_position_is_streaming_llm(judged: Path) -> None:
    frame = table(judged)
    for measure in ("auroc", "rho", "recall"):
        assert values(frame, "position", measure) == values(frame, "streaming_llm", measure)


def test_protection_plays_no_part(judged: Path) -> None:
    """h2o with another protected share scores the same."""
    frame = table(judged)
    for measure in ("auroc", "regret"):
        assert values(frame, "h2o", measure) == values(frame, "h2o:recent_share=0.25", measure)


def test_a_checkpoint_holds_the_tokens_before_it(judged: Path) -> None:
    """After half of the reasoning, half of the candidates are cached."""
    half, end = (table(judged).filter(checkpoint=name, policy="random") for name in ("50%", "end"))
    spans = {
        row["trace_id"]: (row["reasoning_start"], row["reasoning_stop"])
        for row in cfkv.load(judged).traces.collect().iter_rows(named=True)
    }
    for trace_id, step in half.select("trace_id", "step").unique().iter_rows():
        start, stop = spans[trace_id]
        assert step == start + int((stop - start) / 2 + 0.5)
    assert (half["n_candidates"].sum() * 2 - end["n_candidates"].sum()) < 0.1 * end["n_candidates"].sum()


def test_tables(judged: Path) -> None:
    """One partition per policy, with a name that any file system takes; statuses; counts; the summary has all."""
    folders = {path.name for path in (judged / "policy_validity").iterdir()}
    assert {"policy=random", "policy=position", "policy=h2o%3Arecent_share=0.25"} <= folders
    policies = set(table(judged)["policy"])
    assert "h2o:recent_share=0.25" in policies
    status = table(judged, "judged")
    assert set(status["status"]) == {"ok"}
    assert status.height == len(policies) * status["trace_id"].n_unique()
    summary = table(judged, "validity_summary")
    assert set(summary["policy"]) == policies
    assert set(summary["versus"]) == {None, "random", "position"}
    less = summary.filter(
        policy="oracle", versus="random", measure="auroc", kind="occlusion", checkpoint="end"
    )
    assert less["n_policies"].to_list() == [len(policies) - 1]
    assert _guarded(["validate", str(judged)]) == 0


@pytest.mark.parametrize("heads", [(), ("--per-head",)], ids=["mean", "heads"])
def test_stored_signals_are_enough(
    judged: Path,
    copied: Path,
    heads: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same validity to the rounding of stored values, and no model is loaded."""
    assert _guarded(["probe", str(copied), "--groups", "hidden,kv", *heads]) == 0
    own = [*STORED, *MADE_OF_LABELS, "streaming_llm", *(["knorm"] if heads else [])]

    def refuse(self: Session) -> None:
        raise AssertionError("the model was loaded")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "load", refuse)
        assert evaluate(copied, *flags(*own), "--checkpoints", "50%,end") == 0
    mine = table(copied)
    theirs = table(judged).filter(pl.col("policy").is_in(mine["policy"].unique().to_list()))
    key = ["policy", "kind", "trace_id", "checkpoint", "measure", "share"]
    pairs = mine.join(theirs, on=key, suffix="_model", nulls_equal=True)
    assert pairs.height == mine.height == theirs.height
    gap = (pairs["value"] - pairs["value_model"]).abs().fill_nan(0.0)
    print(f"largest difference {gap.max()}")
    assert gap.max() < 0.02  # a swap of two neighbours' ranks
    assert (gap < 1e-9).mean() > 0.95
    record = json.loads((copied / "run.json").read_text())["stages"]["evaluate offline:kv_key"]
    assert "model" not in record["identity"]["config"]
    assert "probe:kv" in record["identity"]["upstream"]


def test_head_means_are_not_enough_for_a_score_per_head(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _guarded(["probe", str(copied), "--groups", "hidden,kv"]) == 0
    capsys.readouterr()
    assert evaluate(copied, *flags("knorm", "kv_key")) == 0
    told = "4 policies judged: 3 from stored signals and labels alone, 1 in one pass of the model over each trace"
    assert told in capsys.readouterr().out


def test_what_was_begun_with_the_model_stays_so(copied: Path) -> None:
    """Signals that come later do not change where a policy's rows are from; --overwrite does."""
    assert evaluate(copied, *flags("kv_key")) == 0
    assert _guarded(["probe", str(copied), "--groups", "kv"]) == 0
    before = table(copied)
    assert evaluate(copied, *flags("kv_key")) == 0
    assert table(copied).equals(before)
    assert evaluate(copied, *flags("kv_key"), "--overwrite") == 0
    stages = json.loads((copied / "run.json").read_text())["stages"]
    assert "model" not in stages["evaluate offline:kv_key"]["identity"]["config"]


def test_an_interrupted_command_continues(
    judged: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the third part; then other policies, then the rest: every row as in one go."""
    own = ("h2o", "snapkv", "kv_key", "oracle")
    with monkeypatch.context() as patched:
        real = offline.labelled_traces

        def stops(run: Any, index: int, *rest: Any) -> Any:
            if index == 2:
                raise KeyboardInterrupt
            return real(run, index, *rest)

        patched.setattr(offline, "labelled_traces", stops)
        with pytest.raises(SystemExit, match="130"):
            evaluate(copied, *flags(*own), "--checkpoints", "50%,end")
    assert 0 < table(copied, "judged").height < 6 * 8
    assert evaluate(copied, *flags("oracle", "anti_oracle"), "--checkpoints", "50%,end") == 0
    assert evaluate(copied, *flags(*own), "--checkpoints", "50%,end") == 0
    for name in ("policy_validity", "judged"):
        whole = table(judged, name)
        assert table(copied, name).equals(
            whole.filter(pl.col("policy").is_in([*own, "anti_oracle", "random", "position"]))
        )
    assert table(copied, "validity_summary")["policy"].n_unique() == 7


def test_shards_share_the_parts(judged: Path, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first leaves the summary to the last."""
    asked = [*flags("h2o", "oracle"), "--checkpoints", "50%,end"]
    assert evaluate(copied, *asked, "--shard", "0/2") == 0
    assert "other shards still owe parts" in capsys.readouterr().out
    assert table(copied, "validity_summary").is_empty()
    assert evaluate(copied, *asked, "--shard", "1/2") == 0
    assert "Policies' scores against occlusion labels" in capsys.readouterr().out
    own = table(judged).filter(pl.col("policy").is_in(["h2o", "oracle", "random", "position"]))
    assert table(copied).equals(own)


def test_blocks_do_not_matter(judged: Path, copied: Path) -> None:
    assert (
        evaluate(copied, *flags("h2o", "snapkv", "epikv"), "--checkpoints", "end,50%", "--chunk-size", "7")
        == 0
    )
    frame, whole = table(copied), table(judged)
    for policy in ("h2o", "snapkv", "epikv"):
        np.testing.assert_allclose(values(frame, policy, "auroc"), values(whole, policy, "auroc"), atol=0.02)


def test_another_configuration_is_refused(refused: Refused, copied: Path) -> None:
    assert evaluate(copied, *flags("oracle"), "--kinds", "occlusion") == 0
    message = refused(*flags("oracle"), "--kinds", "occlusion,eviction_kl")
    assert "config.offline.kinds: ['occlusion'] -> ['eviction_kl', 'occlusion']" in message
    assert "--overwrite" in message


def test_what_is_judged_differently_is_not_summed_up(copied: Path) -> None:
    """The summary holds the policies that were judged as random was."""
    assert evaluate(copied, *flags("oracle"), "--kinds", "occlusion") == 0
    assert evaluate(copied, *flags("anti_oracle"), "--kinds", "eviction_kl", "--overwrite") == 0
    assert set(table(copied, "validity_summary")["policy"]) == {"random", "position", "anti_oracle"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (flags("h2"), "unknown policy 'h2': did you mean 'h2o'"),
        (flags("h2o:recent=1"), "unknown parameter of policy h2o 'recent': did you mean 'recent_share'?"),
        (flags("h2o:recent_share=2"), "policy h2o: recent_share = 2: Input should be less than 1"),
        (["--kinds", "oclusion"], "unknown label kind of this run 'oclusion': did you mean 'occlusion'"),
        (["--checkpoints", "half"], "'half' is no percentage above 0% and below 100%, such as 12.5%"),
        (["--budgets", "100%"], "'100%' is no percentage above 0% and below 100%"),
        (["--budgets", ","], "at least one is needed"),
    ],
)
def test_mistakes(refused: Refused, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_run_without_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert evaluate(run) == 2
    assert f"has no 'trace' stage yet; run `cfkv trace {run}` first" in capsys.readouterr().err
    assert _guarded(["trace", str(run), "--limit", "1", "--max-new-tokens", "384"]) == 0
    assert evaluate(run) == 2
    assert f"has no labels to hold policies against; run `cfkv label {run}` first" in capsys.readouterr().err


def test_columns_that_the_model_cannot_give(
    refused: Refused, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named policies are refused with what to leave out; of all, those are left out."""
    monkeypatch.setattr(compat, "attention_extras", lambda model: {0: "learned sinks", 1: "learned sinks"})
    message = refused(*flags("h2o", "keydiff", "tova"))
    assert (
        "attention of layers 0-1 has learned sinks, so that h2o, tova cannot be judged (attention would"
        in message
    )
    assert "leave them out of --policies" in message
    assert evaluate(copied, "--kinds", "occlusion") == 0
    assert "left out, since the model does not show them attention: ada_kv," in capsys.readouterr().out
    assert "keydiff" in set(table(copied)["policy"])
    assert "h2o" not in set(table(copied)["policy"])


def test_a_dry_run(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(copied, "--dry-run") == 0
    assert "evaluate offline" in capsys.readouterr().out
    assert not (copied / "policy_validity").exists()


def test_names_of_policies() -> None:
    """Text and policy say the same; defaults are left out."""
    for text in (
        "h2o",
        "h2o:recent_share=0.25",
        "epikv:early=[1, 2];rolling=8",
        "ada_kv:base=snapkv_decode;options={kernel: 3}",
    ):
        policy = make_policy(*parse_policy(text))
        assert make_policy(*parse_policy(policy_text(policy))) == policy
    assert policy_text(make_policy("h2o", {"recent_share": 0.5})) == "h2o"
    assert list(named_policies(["h2o: recent_share = 0.50", "h2o"])) == ["random", "position", "h2o"]
    assert {"full", "streaming_llm_36"}.isdisjoint(policy.name for policy in scoring_policies())
    for text, told in (
        ("h2o:recent_share", "is no parameter=value"),
        ("h2o:recent_share=[1", "is not valid YAML"),
    ):
        with pytest.raises(CfkvError, match=told):
            parse_policy(text)


def test_recipe_section() -> None:
    recipe = parse_recipe({"offline": {"policies": ["h2o"], "budgets": ["10%,20%"]}}, "r.yaml")
    assert recipe.offline == OfflineConfig(policies=("h2o",), budgets=("10%", "20%"))
