"""What the labels of the built-in model say of the truth that was planted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cfkv import store
from cfkv.kinds import KINDS, kind_facts
from cfkv.labels._base import label_kinds
from cfkv.schemas import TOKEN_LABELS, TRACES
from cfkv.truth import truth_line, truth_score

# One tagged line between filler. Load-bearing: R1 (9), 6 (11), R1=6 (12) for kinds that replace text, 11 and 12 for
# kinds that remove cached entries; the facts are 8 to 13.
WORDS = ["now", "we", "%a", "=5", "5", ";", "go", "on", "%b", "R1", "+1", "6", "R1=6", ";", "now", "we"]


def write(run: Path, kind: str, labels: list[dict[str, Any]], words: list[str] = WORDS) -> None:
    """A run of one trace per label."""
    traces = [
        {
            "trace_id": f"t{number}",
            "dataset": "registers",
            "problem_id": f"p{number}",
            "token_ids": list(range(len(words))),
            "token_texts": [words[0], *(f" {word}" for word in words[1:])],
            "reasoning_start": 0,
            "reasoning_stop": len(words),
        }
        for number in range(len(labels))
    ]
    rows = [
        {"trace_id": f"t{number}", "problem_id": f"p{number}", "kind": kind, "status": "labelled", **label}
        for number, label in enumerate(labels)
    ]
    store.write_part(run, TRACES, None, 0, store.to_arrow(TRACES, traces), "f")
    store.write_part(run, TOKEN_LABELS, kind, 0, store.to_arrow(TOKEN_LABELS, rows), "f")


def test_the_sentence_of_a_window_kind_by_hand(tmp_path: Path) -> None:
    """One of the three load-bearing tokens is missed, one filler token is marked.

    Of 16 words 10 are off the facts, of which word 1 is marked: 10.0 %. Of the 3, words 11 and 12 are: 66.7 %.
    AUROC of a 0/1 score: (sensitivity + specificity) / 2; marked are words 1, 8, 11 and 12, so that of the 13 others 2
    are marked: (2/3 + 11/13) / 2 = 0.756. The value is largest on the three: 1.
    """
    marked = {1, 8, 11, 12}
    label = {
        "importance": [int(place in marked) for place in range(len(WORDS))],
        "value": [float(place in {9, 11, 12}) for place in range(len(WORDS))],
    }
    write(tmp_path, "occlusion", [label])
    assert truth_line(tmp_path, "occlusion") == (
        "planted truth (occlusion): occlusion calls 66.7% of 3 load-bearing tokens important and 10.0% of 10 tokens "
        "off the facts; AUROC of its labels 0.756, of its value 1.000 (1 trace; 95 % intervals, traces resampled)"
    )
    assert truth_line(tmp_path, "knockout") is None


def test_the_sentence_of_a_graded_kind_by_hand(tmp_path: Path) -> None:
    """Two traces; values 5 on R1=6, 4 on word 1, 3 on the first trace's digit, 0 elsewhere; the last word is untested.

    High damage: of 15 tested tokens 1.5 rounds to 2: words 12 and 1. Recall: 12 but not 11, 50 %. Off the facts are
    words 0 to 7 and 14 of each trace: 1 of 9, 11.1 %. AUROC: positives 3, 5, 0, 5; negatives twice 4 and 24 times 0:
    (24 + 26 + 12 + 26) / (4 * 26) = 0.846. A quarter of the resamples holds the first trace twice (13 + 12 of 26,
    0.962), a quarter the second (13 + 6 of 26, 0.731): these are the percentiles.
    """
    labels = []
    for digit in (3.0, 0.0):
        value = [{12: 5.0, 1: 4.0, 11: digit, 15: math.nan}.get(place, 0.0) for place in range(len(WORDS))]
        labels.append({"importance": [-1] * len(WORDS), "value": value})
    write(tmp_path, "eviction_kl", labels)
    assert truth_line(tmp_path, "eviction_kl") == (
        "planted truth (cache): eviction_kl calls 50.0% [50.0%, 50.0%] of 4 load-bearing tokens high damage and 11.1% "
        "[11.1%, 11.1%] of 18 tokens off the facts; AUROC of its value 0.846 [0.731, 0.962] (2 traces; 95 % intervals, "
        "traces resampled)"
    )


def test_untested_truth_and_a_ceiling_are_said(tmp_path: Path) -> None:
    """Words 11 to 15 come after the last checkpoint; then 2 of 16 words are wanted and one can be: n = 4, k = 1."""
    late = [1.0 * place if place < 11 else math.nan for place in range(len(WORDS))]
    write(tmp_path / "a", "eviction_kl", [{"importance": [-1] * 16, "value": late}])
    assert "2 load-bearing tokens untested" in str(truth_line(tmp_path / "a", "eviction_kl"))
    few = [math.nan] * 10 + [0.0, 2.0, 1.0, 0.0] + [math.nan] * 2
    write(tmp_path / "b", "eviction_kl", [{"importance": [-1] * 16, "value": few}])
    score = truth_score(tmp_path / "b", "eviction_kl")
    assert score is not None
    assert (score.recall.estimate, score.ceiling, score.value_auroc.estimate) == (0.5, 0.5, 1.0)
    assert "(at most 50.0% can be" in str(truth_line(tmp_path / "b", "eviction_kl"))


def test_traces_of_other_tokens_are_left_out(tmp_path: Path) -> None:
    """A token that holds two words: the truth of its words has no token to stand on."""
    label = {"importance": [1] * 15, "value": [1.0] * 15}
    write(tmp_path, "occlusion", [label], ["now we", *WORDS[2:]])
    assert truth_line(tmp_path, "occlusion") is None


@pytest.mark.parametrize("kind", label_kinds.names())
def test_every_kind_says_which_truth_it_looks_for(kind: str) -> None:
    """And in which unit its value is: the first word of what the class declares."""
    assert kind in KINDS
    assert label_kinds.get(kind).unit.replace(",", " ").split()[0] == kind_facts(kind).unit
