"""The truth table's figures by hand, and a small one of the real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cfkv.problems.registers import planted_truth
from pipelines.truth_table import evidence
from pipelines.truth_table.page import page
from pipelines.truth_table.runs import ROWS, make
from pipelines.truth_table.scores import Planted, perfect_flips, perfect_labels, pooled_auroc, pooled_share
from pipelines.truth_table.table import build

# 12 tokens of which one (5) bears load; windows of 4 with stride 2 are 0-3, 2-5, 4-7, 6-9, 8-11.
BEARING = np.arange(12) == 5
SPANS = [(0, 4), (2, 6), (4, 8), (6, 10), (8, 12)]
# A prompt of one word, a tagged line between filler, and the answer.
WORDS = ["<bos>", "now", "%a", "=5", "5", ";", "%b", "R1", "+1", "6", "R1=6", ";", "we", "</think>"]
WORDS += ["\\boxed{", "R1=6", "}"]
START, STOP = 1, 13


def planted(value: list[float], importance: list[int]) -> Planted:
    """The trace above with labels for its 12 reasoning tokens."""
    truth = planted_truth(WORDS[START:STOP])
    return Planted("t", WORDS, START, STOP, truth, np.array(importance, np.int8), np.array(value, np.float32))


def test_smear_by_hand() -> None:
    """Two windows touch token 5 and mark 2 to 7: of 11 tokens that bear no load 5 are marked, so (1 + 6/11) / 2."""
    assert perfect_flips("occlusion", BEARING, SPANS) == [False, True, True, False, False]
    labels = perfect_labels("occlusion", BEARING, 4, 2)
    assert np.flatnonzero(labels).tolist() == [2, 3, 4, 5, 6, 7]
    assert pooled_auroc([labels], [BEARING]).estimate == pytest.approx((1 + 6 / 11) / 2)
    assert pooled_auroc([perfect_labels("knockout", BEARING, 1, 1)], [BEARING]).estimate == 1


def test_a_perfect_cut_loses_all_that_follows() -> None:
    """Cuts at 0, 2 and 4 come before token 5, and mark 0 to 7: 7 of the 11 others."""
    assert perfect_flips("truncation", BEARING, SPANS) == [True, True, True, False, False]
    labels = perfect_labels("truncation", BEARING, 4, 2)
    assert np.flatnonzero(labels).tolist() == list(range(8))
    assert pooled_auroc([labels], [BEARING]).estimate == pytest.approx((1 + 4 / 11) / 2)


def test_pooled_figures_resample_traces() -> None:
    """Two traces, one perfect and one reversed: draws of one trace alone give 1 and 0, the pool 1/2."""
    values, truth = [[1.0, 0.0, np.nan], [0.0, 1.0, 5.0]], [[1, 0, 1], [1, 0, 0]]
    area = pooled_auroc([values[0], values[1][:2]], [truth[0], truth[1][:2]])
    assert (area.estimate, area.low, area.high) == (0.5, 0.0, 1.0)
    share = pooled_share([[True, True], [False, False, False]])
    assert (share.estimate, share.low, share.high) == (0.4, 0.0, 1.0)


def test_roles_by_hand() -> None:
    """Each word of the trace above, and its line."""
    roles = evidence.roles_of(planted([0.0] * 12, [0] * 12))
    assert roles.names == [
        *("prompt", "filler", "name", "operation", "digit", ";", "name", "tag", "operation", "fact digit"),
        *("fused fact", ";", "filler", "closing", "closing", "answer fact", "closing"),
    ]
    assert roles.lines == [0, 0, 1, 1, 1, 1, *[2] * 11]


def test_effects_by_part_by_hand() -> None:
    """Flips count where there are any labels, else values; reasoning token 6 is R1, 8 its digit, 9 the fused fact."""
    flips = [int(place in (6, 9)) for place in range(12)]
    assert evidence.by_part([planted([1.0] * 12, flips)]) == [
        {"slot": "R1", "n": 1, "tag": 1, "digit": 0, "fused fact": 1}
    ]
    values = [0.5 if place == 8 else 1e-6 for place in range(12)]
    assert evidence.by_part([planted(values, [-1] * 12)]) == [
        {"slot": "R1", "n": 1, "tag": 0, "digit": 1, "fused fact": 0}
    ]


def test_removals_by_role_and_by_what_they_disturb() -> None:
    """Three removals; a KL counts where the token is written that it is about."""
    found = [
        evidence.Removal(0, "digit", "this line", 1, False, 0.3, [0.6, 0.0], ["filler", "answer fact"]),
        evidence.Removal(0, "digit", "this line", 20, False, 0.1, [0.0, 0.2], ["filler", "answer fact"]),
        evidence.Removal(0, "fused fact", "earlier", 80, True, 0.6, [0.0, 1.2], ["filler", "answer fact"]),
    ]
    rows = evidence.by_role(found)
    assert [(row["removed"], row["n"], round(row["share_of_all_kl"], 6)) for row in rows] == [
        ("fused fact", 1, 0.6),
        ("digit", 2, 0.4),
    ]
    assert rows[1]["mostly_disturbs"] == "filler"
    assert rows[1]["share_there"] == pytest.approx(0.75)
    assert evidence.by_written(found, "fused fact") == {"answer facts": 1.2, "anything else": 0.0}
    assert [(row["from"], row["n"]) for row in evidence.by_distance(found)] == [(1, 1), (17, 1), (65, 1)]
    assert evidence.auroc_of(found, 1)["estimate"] == 1


def test_the_real_model_meets_the_truth(tmp_path: Path) -> None:
    """8 traces, windows of 8: the AUROC is above .9, no higher than perfect flips but for rounding, and is printed."""
    wanted = [row for row in ROWS if row.folder in ("occlusion-8-4", "eviction-boundary")]
    make(tmp_path, 8, wanted)
    content = build(tmp_path, 8, wanted)
    occlusion, eviction = content["rows"]
    assert occlusion["auroc_label"]["estimate"] > 0.9
    assert abs(
        occlusion["auroc_label"]["estimate"] - occlusion["auroc_label_with_perfect_flips"]["estimate"]
    ) < (0.02)
    assert occlusion["flips_as_planted"]["estimate"] > 0.98
    assert eviction["auroc_value"]["estimate"] > 0.9
    assert f"{occlusion['auroc_label']['estimate']:.3f}" in page(content)
