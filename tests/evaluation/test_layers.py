"""`epikv:layers=from:RUN`: which layers a table of correlations gives, and a run that takes them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import polars as pl
import pytest

from cfkv import store
from cfkv.config import (
    CorrelateConfig,
    Execution,
    LabelConfig,
    OnlineConfig,
    ProbeConfig,
    Recipe,
    TraceConfig,
)
from cfkv.errors import CfkvError
from cfkv.evaluation._layers import chosen
from cfkv.policies._base import make_policy, policy_kinds
from cfkv.policies._hidden import HiddenPolicy
from cfkv.schemas import CORRELATIONS, EVALUATIONS, TRACES
from cfkv.session import Session
from cfkv.stage import Run

# rho and adjusted p of the embedding (-1) and of layers 0 to 6
RHOS = [0.9, -0.1, 0.2, 0.3, 0.25, -0.4, -0.3, -0.2]
ADJUSTED = [0.001, 0.001, 0.04, 0.01, 0.06, 0.001, 0.02, 0.3]


def table(
    rhos: list[float] = RHOS,
    adjusted: list[float] = ADJUSTED,
    smoothing: str = "rolling_z",
    kind: str = "knockout",
    measure: str = "spearman_within",
    signal: str = "hidden_diff",
) -> pl.DataFrame:
    """Rows of `correlations` by hand."""
    rows = [
        {
            **dict.fromkeys(CORRELATIONS.schema.names),
            "kind": kind,
            "signal": signal,
            "layer": layer,
            "smoothing": smoothing,
            "control": "none",
            "measure": measure,
            "estimate": rho,
            "pvalue": p / 2,
            "adjusted_pvalue": p,
            "nan_reason": "fewer than 2 usable traces" if math.isnan(rho) else None,
        }
        for layer, (rho, p) in enumerate(zip(rhos, adjusted, strict=True), start=-1)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def hidden(name: str) -> HiddenPolicy:
    policy = make_policy(name)
    assert isinstance(policy, HiddenPolicy)
    return policy


def layers(frame: pl.DataFrame, name: str, label: str = "knockout") -> tuple[list[int], list[int]]:
    early, late = chosen(frame, hidden(name), label, "other")
    return [each.layer for each in early], [each.layer for each in late]


def test_extremes_by_hand() -> None:
    """The embedding's .9 is no layer of a policy; 2 is the most positive block, 4 the most negative."""
    assert layers(table(), "epikv") == ([2], [4])
    early, _ = chosen(table(), hidden("epikv"), "knockout", "other")
    assert (early[0].estimate, early[0].pvalue, early[0].adjusted_pvalue) == (0.3, 0.005, 0.01)
    # Other signals, measures and smoothings are not looked at.
    noise = [table(rhos=RHOS[::-1], **{each: "raw"}) for each in ("smoothing", "signal", "measure")]
    assert layers(pl.concat([*noise, table()]), "epikv") == ([2], [4])
    assert layers(pl.concat([*noise, table()]), "epikv_raw") == ([6], [1])  # the same in reverse


def test_bands_by_hand() -> None:
    """From 2 (p .01) to 1 (p .04), not to 3 (p .06); from 4 to 5, not to 6 (p .3), nor over the sign to 0."""
    assert layers(table(), "epikv_band") == ([1, 2], [4, 5])


def test_a_band_whose_extreme_is_not_significant_is_the_extreme_alone() -> None:
    adjusted = [1, 1, 0.01, 0.2, 0.01, math.nan, 0.01, 1]
    assert layers(table(adjusted=adjusted), "epikv_band") == ([2], [4])
    early, late = chosen(table(adjusted=adjusted), hidden("epikv_band"), "knockout", "other")
    assert not early[0].significant
    assert (late[0].adjusted_pvalue, late[0].significant) == (None, False)
    assert str(early[0]) == "2 (rho +0.30, adjusted p 0.2, not significant)"


def test_a_layer_without_estimate_ends_a_band() -> None:
    rhos = [math.nan, 0.2, math.nan, 0.3, 0.25, -0.4, -0.4, 0.1]
    small = [0.001] * 8
    assert layers(table(rhos=rhos, adjusted=small), "epikv_band") == ([2, 3], [4, 5])
    assert layers(table(rhos=rhos, adjusted=small), "epikv") == ([2], [4, 5])  # a tie: both


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            table(rhos=[0.9, -0.1, -0.2, -0.3, -0.1, -0.4, -0.3, -0.2]),
            "no layer of other has a positive correl",
        ),
        (
            table(rhos=[-0.9, 0.1, 0.2, 0.3, 0.1, 0.4, 0.3, 0.2]),
            "has a negative .* no late layer; name layers with",
        ),
        (
            table(kind="occlusion"),
            "with kind 'knockout', but kind occlusion; run `cfkv label other --kind knock",
        ),
        (
            table(smoothing="raw"),
            "smoothing 'rolling_z', but smoothing raw; run `cfkv correlate other --smoothings",
        ),
        (table(signal="key_norm"), "but none at all; run `cfkv probe other --groups hidden`, then correlate"),
        (table(rhos=[math.nan] * 8), r"no layer of other .* \(fewer than 2 usable traces\); label more"),
    ],
)
def test_tables_that_give_no_layers(frame: pl.DataFrame, message: str) -> None:
    with pytest.raises(CfkvError, match=message):
        chosen(frame, hidden("epikv"), "knockout", "other")


def test_every_hidden_policy_says_how_it_smooths() -> None:
    found = {
        policy.name: (policy.smoothing, policy.banded)
        for policy in map(make_policy, policy_kinds.names())
        if isinstance(policy, HiddenPolicy)
    }
    assert found == {
        "epikv": ("rolling_z", False),
        "epikv_band": ("rolling_z", True),
        "epikv_ema": ("ema", False),
        "epikv_ema_slow": ("ema", False),
        "epikv_raw": ("raw", False),
        "epikv_rolling_mean": ("rolling_mean", False),
        "segment_hybrid": ("rolling_z", False),
        "segment_hybrid_keys": ("rolling_z", False),
    }


def session(folder: Path, seed: int, limit: int, policies: tuple[str, ...] = ()) -> Session:
    recipe = Recipe(
        trace=TraceConfig(limit=limit, part_size=2, max_new_tokens=384, seed=seed),
        label=(LabelConfig(kind="knockout", window=16, stride=8, max_new_tokens=24),),
        probe=ProbeConfig(groups=("hidden",)),
        correlate=CorrelateConfig(draws=100),
        online=OnlineConfig(policies=policies, budgets=("50%",), label="knockout", max_new_tokens=24),
    )
    return Session.open(folder, recipe, Execution(device="cpu"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with correlations, and one of other problems with traces.

    All four layers correlate positively in so small a pilot: the last one is turned round by hand.
    """
    folder = tmp_path_factory.mktemp("layers")
    first = session(folder / "pilot", seed=1, limit=6)
    first.trace()
    first.label("knockout")
    first.probe()
    first.correlate()
    frame = store.collect(folder / "pilot", CORRELATIONS)
    turned = (
        pl.when((pl.col("signal") == "hidden_diff") & (pl.col("layer") == 3)).then(-1).otherwise(1).alias("s")
    )
    frame = frame.with_columns(turned).with_columns(pl.col("estimate") * pl.col("s")).drop("s")
    mark = Run(folder / "pilot").require("correlate")["fingerprint"]
    part = frame.to_arrow().cast(CORRELATIONS.schema)
    store.write_part(folder / "pilot", CORRELATIONS, None, 0, part, mark)
    session(folder / "test", seed=2, limit=3).trace()
    return folder / "pilot", folder / "test"


def test_a_run_takes_its_layers_from_another(runs: tuple[Path, Path]) -> None:
    pilot, test = runs
    frame = store.collect(pilot, CORRELATIONS).filter(
        (pl.col("signal") == "hidden_diff")
        & (pl.col("measure") == "spearman_within")
        & (pl.col("smoothing") == "rolling_z")
        & (pl.col("layer") >= 0)
    )
    ordered = frame.sort("estimate")["layer"].to_list()
    early, late = ordered[-1], ordered[0]
    assert late == 3
    chosen_run = session(test, 2, 3, (f"epikv:layers=from:{pilot}",))
    result = chosen_run.evaluate_online()
    rows = store.collect(test, EVALUATIONS).filter(pl.col("policy") == "epikv")
    assert rows["parameters"].unique().to_list() == [f"early=[{early}];late=[{late}]"]
    assert rows["status"].unique().to_list() == ["ok"]
    manifest = json.loads((test / "run.json").read_text(encoding="utf-8"))["stages"]
    name = f"evaluate online:forced-epikv@early=({early})+late=({late})-50pct"
    record = manifest[name]["layers_from"]
    other = json.loads((pilot / "run.json").read_text(encoding="utf-8"))["stages"]["correlate"]
    assert (record["run"], record["fingerprint"]) == (str(pilot), other["fingerprint"])
    row = frame.filter(pl.col("layer") == early).row(0, named=True)
    assert record["early"][0] == {
        name: row[name] for name in ("layer", "estimate", "pvalue", "adjusted_pvalue")
    }
    assert record["significant"]["early"] == (row["adjusted_pvalue"] < 0.05)
    assert f"epikv:early=[{early}];late=[{late}]: early {early} (rho " in result.note
    assert "layers_from" not in manifest["evaluate online:forced-random-50pct"]
    chosen_run.compare()  # finds the same arms again


def test_the_same_problems_are_refused_before_a_model_is_loaded(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Fewer problems of the pilot's seed are all among the pilot's."""
    pilot, _ = runs
    again = session(tmp_path / "again", seed=1, limit=3)
    again.trace()
    again = session(tmp_path / "again", 1, 3, (f"epikv:layers=from:{pilot}",))
    message = r"3 of 3 problems of .*again are problems of .*pilot too, such as registers-00000 of registers; layers of"
    with pytest.raises(CfkvError, match=message):
        again.evaluate_online()
    assert again._loaded is None
    ids = [store.collect(path, TRACES)["problem_id"].sort().to_list() for path in runs]
    assert set(ids[1]) <= set(ids[0])  # of another seed: the same ids are other problems


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epikv:layers=2", r"layers = 2 is not from:RUN; write epikv:layers=from:RUN"),
        ("epikv:layers=from:", r"layers = .* is not from:RUN"),
        ("epikv:layers=from:{pilot};early=[1]", "layers sets early and late; leave out early"),
        ("epikv:layers=from:{pilot}/none", "is no run directory"),
        ("epikv:layers=from:{test}", "has no 'correlate' stage yet; run `cfkv correlate"),
        (
            "epikv:layers=from:{pilot};rolling=32",
            "smooths with rolling 32, .* rolling_window 64; run `cfkv corr",
        ),
        ("epikv_ema_slow:layers=from:{pilot}", "--ema-alpha 0.1 --overwrite`, or set newest=0.9"),
        ("h2o:layers=from:{pilot}", "unknown parameter of policy h2o 'layers'"),
    ],
)
def test_messages(text: str, message: str, runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Before anything is run."""
    filled = text.format(pilot=runs[0], test=runs[1])
    with pytest.raises(CfkvError, match=message):
        session(tmp_path / "none", 2, 3, (filled,)).check_names(["evaluate online"])
