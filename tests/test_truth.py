"""What the labels of the built-in model say of the truth that was planted."""

from __future__ import annotations

from pathlib import Path

from cfkv import store
from cfkv.schemas import TOKEN_LABELS, TRACES
from cfkv.truth import truth_line


def test_the_sentence_by_hand(tmp_path: Path) -> None:
    """One tagged line between filler; one of its three load-bearing tokens is missed, one filler token is marked.

    Words: now we %a =5 5 ; go on %b R1 +1 6 R1=6 ; now we. Load-bearing: R1 (9), 6 (11), R1=6 (12); the facts are
    8 to 13. Of 16 words 10 are off the facts, of which word 1 is marked: 10.0 %. Of the 3, words 11 and 12 are: 66.7 %.
    AUROC of a 0/1 score: (sensitivity + specificity) / 2; marked are words 1, 8, 11 and 12, so that of the 13 others 2
    are marked: (2/3 + 11/13) / 2 = 0.756.
    """
    words = ["now", "we", "%a", "=5", "5", ";", "go", "on", "%b", "R1", "+1", "6", "R1=6", ";", "now", "we"]
    marked = {1, 8, 11, 12}
    trace = {
        "trace_id": "t",
        "dataset": "registers",
        "problem_id": "p",
        "token_texts": [words[0], *(f" {word}" for word in words[1:])],
        "reasoning_start": 0,
        "reasoning_stop": len(words),
    }
    label = {"trace_id": "t", "problem_id": "p", "kind": "occlusion", "status": "labelled"}
    label["importance"] = [int(place in marked) for place in range(len(words))]  # type: ignore[assignment]
    store.write_part(tmp_path, TRACES, None, 0, store.to_arrow(TRACES, [trace]), "f")
    store.write_part(tmp_path, TOKEN_LABELS, "occlusion", 0, store.to_arrow(TOKEN_LABELS, [label]), "f")
    assert truth_line(tmp_path, "occlusion") == (
        "planted truth: occlusion calls 66.7% of 3 load-bearing tokens important and 10.0% of 10 tokens off the facts "
        "(AUROC 0.756, 1 traces)"
    )
    assert truth_line(tmp_path, "knockout") is None
