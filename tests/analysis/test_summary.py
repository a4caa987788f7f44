import io
import math

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from cfkv.analysis.correlate import correlate
from cfkv.analysis.summary import correlation_table, label_counts, strongest
from cfkv.config import CorrelateConfig
from cfkv.errors import CfkvError

from .tables import planted, study

CONFIG = CorrelateConfig(draws=200, rolling_window=8)


@pytest.fixture(scope="module")
def frame():
    labels, signals = planted(10)
    rng = np.random.default_rng(5)
    noise = [rng.standard_normal(block.shape) for block in signals["g"]]
    constant = [0 * block for block in noise]
    return correlate(*study(labels, {**signals, "noise": noise, "flat": constant}), CONFIG)


def render(table, width=80):
    buffer = io.StringIO()
    Console(file=buffer, width=width).print(table)
    return buffer.getvalue()


def test_strongest_is_sorted_by_distance_from_no_association(frame):
    for measure, null in (("spearman_within", 0.0), ("auroc", 0.5)):
        best = strongest(frame, 5, measure)
        distance = (best["estimate"] - null).abs().to_list()
        assert len(distance) == 5
        assert distance == sorted(distance, reverse=True)
        assert best.row(0, named=True)["signal"] == "g"
        assert best.columns == frame.columns
    assert strongest(frame, 1000)["estimate"].is_finite().all()


def test_table_says_what_is_significant_what_is_not_and_what_is_missing(frame):
    text = render(correlation_table(frame))
    assert "…" not in text  # nothing is cut at 80 columns
    planted_entry, rest = text[text.index("\ng ") :].split("\nnoise", 1)
    assert "not" not in planted_entry
    noise_entry, flat_entry = rest.split("\nflat", 1)
    assert "not" in noise_entry
    assert "significant" in noise_entry
    assert "constant signal" in " ".join(flat_entry.split())
    best = (
        frame.filter(measure="spearman_within", signal="g")
        .filter(pl.col("adjusted_pvalue") < 0.05)
        .sort(pl.col("estimate").abs())
        .row(-1, named=True)
    )
    estimate, low, high = (f"{best[name]:+.2f}".replace("0.", ".") for name in ("estimate", "low", "high"))
    assert estimate in planted_entry
    assert f"[{low}, {high}]" in planted_entry
    assert best["smoothing"] in planted_entry


def test_table_of_nothing(frame):
    assert "rho" in render(correlation_table(frame.head(0)))


def run_tables():
    labels = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, -1, -1]]
    traces, token_labels, _ = study(labels, {"g": [np.zeros((1, 4))] * 3})
    extra = {"t003": (False, "ok"), "t004": (None, "length"), "t005": (True, "ok"), "t006": (True, "ok")}
    more = pl.DataFrame(
        {
            "trace_id": list(extra),
            "correct": [correct for correct, _ in extra.values()],
            "status": [status for _, status in extra.values()],
        }
    )
    failed = pl.DataFrame(
        {
            "trace_id": ["t005", "t006"],
            "problem_id": ["t005", "t006"],
            "kind": ["occlusion"] * 2,
            "status": ["excluded", "failed"],
        }
    )
    windows = pl.DataFrame(
        {"kind": ["occlusion"] * 3 + ["null"], "flipped": [True, False, None, False], "status": ["ok"] * 4}
    )
    return (
        pl.concat([traces, more], how="diagonal"),
        pl.concat([token_labels, failed], how="diagonal"),
        windows,
    )


def test_label_counts_by_hand():
    counts = label_counts(*run_tables(), kind="occlusion")
    assert (counts.n_traces, counts.n_correct, counts.n_incorrect) == (7, 5, 1)
    assert (counts.n_labelled, counts.n_excluded) == (3, 1)
    assert counts.n_failed_by_status == {"labels: failed": 1, "length": 1}
    assert (counts.n_windows, counts.n_flipped) == (3, 1)
    # 4 + 4 + 2 tested, 1 + 2 + 0 important
    assert (counts.n_tested, counts.n_important) == (10, 3)
    share = counts.important_share
    assert share.estimate == pytest.approx(0.3)
    # a resample is at lowest three times [0, 0] and at highest three times [1, 1, 0, 0]
    assert 0 <= share.low < 0.3 < share.high <= 0.5
    assert counts == label_counts(*run_tables(), kind="occlusion")


def test_label_counts_needs_a_kind_and_two_problems():
    traces, token_labels, windows = run_tables()
    assert label_counts(traces, token_labels, windows).kind == "occlusion"
    two_kinds = pl.concat([token_labels, token_labels.with_columns(kind=pl.lit("knockout"))])
    with pytest.raises(CfkvError, match="2 label kinds \\(knockout, occlusion\\)"):
        label_counts(traces, two_kinds, windows)
    with pytest.raises(CfkvError, match="did you mean 'occlusion'"):
        label_counts(traces, token_labels, windows, "oclusion")
    one = label_counts(traces, token_labels.head(1), windows.head(3))
    assert one.important_share.reason == "fewer than 2 labelled problems"
    assert math.isnan(one.important_share.estimate)
