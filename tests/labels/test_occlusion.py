"""Occlusion labels of single traces: controls, exclusions, untested tokens, and literal = fast in every row."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cfkv.answers import exact_match
from cfkv.config import Execution, LabelConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.labels._base import LabelledTrace, LabelTrace, label_kinds
from cfkv.labels._packed import Counterfactual
from cfkv.labels.occlusion import Occlusion
from cfkv.models.loading import LoadedModel
from cfkv.problems.registers import Registers, planted_truth

CONFIG = LabelConfig(window=8, stride=4, max_new_tokens=40)


def trace_of(builtin: LoadedModel, seed: int, answer: str | None = None) -> LabelTrace:
    """A registers trace spelt out, with its own answer or another one."""
    problem = next(Registers().load(None, seed=seed))
    given = problem.answer if answer is None else answer
    encode = builtin.tokenizer.encode
    prompt, reasoning = encode(problem.question), encode(problem.solution or "")
    context = [*prompt, *reasoning, *encode("</think>")]
    box = encode(f"\\boxed{{ {given} }}")
    return LabelTrace(
        trace_id="t/0",
        problem_id="t",
        token_ids=(*context, *box, *encode("<eos>")),
        reasoning_start=len(prompt),
        reasoning_stop=len(prompt) + len(reasoning),
        answer_start=len(context),
        answer_stop=len(context) + len(box),
        answer_prefix="",
        answer=given,
    )


def label(builtin: LoadedModel, trace: LabelTrace, config: LabelConfig = CONFIG, **run: Any) -> LabelledTrace:
    return Occlusion(builtin, config, Execution(device="cpu", **run), exact_match).label(trace)


@pytest.fixture(scope="module")
def trace(builtin: LoadedModel) -> LabelTrace:
    return trace_of(builtin, 41)


@pytest.fixture(scope="module")
def labelled(builtin: LoadedModel, trace: LabelTrace) -> LabelledTrace:
    return label(builtin, trace)


def test_windows_cover_the_reasoning(trace: LabelTrace, labelled: LabelledTrace) -> None:
    length = trace.reasoning_stop - trace.reasoning_start
    rows = labelled.rows
    assert len(rows) == -(-(length - 8) // 4) + 1 == labelled.tokens["n_windows"]
    for index, row in enumerate(rows):
        start = trace.reasoning_start + 4 * index
        assert (row["window_index"], row["start"]) == (index, start)
        assert row["stop"] == min(start + 8, trace.reasoning_stop)
        assert (row["scope"], row["kind"], row["replacement_id"], row["status"]) == (
            *("all", "occlusion", 0),
            "ok",
        )
        assert row["answered"] == (row["answer"] is not None)
        assert row["flipped"] == (row["answer"] != trace.answer)
        if row["accepted_draft"] == 6:
            assert row["decoded"] == 0
    assert 0 < labelled.tokens["n_flipped"] == sum(row["flipped"] for row in rows) < len(rows)


def test_untested_is_exactly_prompt_and_answer(trace: LabelTrace, labelled: LabelledTrace) -> None:
    importance, value = np.asarray(labelled.tokens["importance"]), np.asarray(labelled.tokens["value"])
    assert len(importance) == len(value) == len(trace.token_ids)
    inside = np.zeros(len(trace.token_ids), dtype=bool)
    inside[trace.reasoning_start : trace.reasoning_stop] = True
    assert ((importance == -1) == ~inside).all()
    assert (np.isnan(value) == ~inside).all()


def test_token_labels_are_the_or_and_the_mean_of_the_windows(
    trace: LabelTrace, labelled: LabelledTrace
) -> None:
    for token in range(trace.reasoning_start, trace.reasoning_stop):
        over = [row for row in labelled.rows if row["start"] <= token < row["stop"]]
        assert labelled.tokens["importance"][token] == int(any(row["flipped"] for row in over))
        mean = sum(row["delta_nll"] for row in over) / len(over)
        assert labelled.tokens["value"][token] == pytest.approx(mean, abs=1e-5)


def test_labels_find_what_was_planted(
    builtin: LoadedModel, trace: LabelTrace, labelled: LabelledTrace
) -> None:
    """The built-in task's truth: windows over a fused fact of the answer flip, filler does not."""
    words = builtin.tokenizer.convert_ids_to_tokens(
        list(trace.token_ids[trace.reasoning_start : trace.reasoning_stop])
    )
    truth = planted_truth(words)
    right = []
    for row in labelled.rows:
        piece = slice(row["start"] - trace.reasoning_start, row["stop"] - trace.reasoning_start)
        if truth.occlusion[piece].any():
            right.append(row["flipped"])
        elif not truth.fact[piece].any():
            right.append(not row["flipped"])
    print(f"{sum(right)} of {len(right)} windows as planted")
    assert sum(right) >= 0.9 * len(right)


@pytest.mark.parametrize(
    "config",
    [CONFIG, LabelConfig(window=8, stride=16, max_new_tokens=6), LabelConfig(window=500, replacement="eos")],
)
def test_literal_gives_the_same_rows(builtin: LoadedModel, trace: LabelTrace, config: LabelConfig) -> None:
    fast, literal = label(builtin, trace, config, chunk_size=300), label(builtin, trace, config, literal=True)
    assert len(fast.rows) == len(literal.rows)
    largest = 0.0
    for mine, theirs in zip(fast.rows, literal.rows, strict=True):
        loose = ("delta_nll", "min_margin", "decoded")
        assert {k: v for k, v in mine.items() if k not in loose} == {
            k: v for k, v in theirs.items() if k not in loose
        }
        largest = max([largest, *(abs(mine[k] - theirs[k]) for k in loose[:2])])
    print(f"{len(fast.rows)} windows, largest difference {largest:.2e}")
    assert largest < 1e-4
    assert fast.tokens["status"] == literal.tokens["status"]
    if fast.tokens["status"] == "labelled":
        np.testing.assert_array_equal(fast.tokens["importance"], literal.tokens["importance"])
        np.testing.assert_allclose(fast.tokens["value"], literal.tokens["value"], atol=1e-4)


@pytest.mark.parametrize("literal", [False, True])
def test_control_that_disagrees_is_excluded(builtin: LoadedModel, *, literal: bool) -> None:
    """A correct-looking trace whose answer the model would not give again: every window would flip."""
    own = trace_of(builtin, 41)
    other = trace_of(builtin, 41, answer="R1=0 R2=0 R3=0 R4=0")
    found = label(builtin, other, literal=literal)
    assert found.rows == []
    assert (found.tokens["status"], found.tokens["control_agrees"], found.tokens["n_windows"]) == (
        *("excluded", False),
        0,
    )
    assert found.tokens["control_answer"] == own.answer
    assert own.answer in found.tokens["reason"]
    assert other.answer in found.tokens["reason"]
    assert "importance" not in found.tokens


def test_cap_that_closes_no_box_excludes(builtin: LoadedModel, trace: LabelTrace) -> None:
    config = LabelConfig(window=8, stride=4, max_new_tokens=3)
    for literal in (False, True):
        found = label(builtin, trace, config, literal=literal)
        assert (found.tokens["status"], found.tokens["control_answer"]) == ("excluded", None)


def test_window_that_replaces_nothing_changes_nothing(
    builtin: LoadedModel, trace: LabelTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Occlusion,
        "counterfactual",
        lambda self, trace, span: Counterfactual(span[0], trace.context[span[0] :]),
    )
    found = label(builtin, trace)
    assert found.tokens["n_flipped"] == 0
    assert not any(row["decoded"] for row in found.rows)
    floor = max(abs(row["delta_nll"]) for row in found.rows)
    print(f"noise floor of delta_nll: {floor:.2e}")
    assert floor < 1e-5


def test_traces_that_cannot_be_labelled(builtin: LoadedModel, trace: LabelTrace) -> None:
    empty = dataclasses.replace(trace, reasoning_stop=trace.reasoning_start)
    with pytest.raises(ItemError, match="no_reasoning"):
        label(builtin, empty)
    row = {**dataclasses.asdict(trace), "answer_stop": trace.answer_start, "status": "ok"}
    with pytest.raises(ItemError, match="no_answer"):
        LabelTrace.from_row(row)
    long = dataclasses.replace(
        trace, token_ids=trace.token_ids * 4, answer_start=510, answer_stop=510 + 6, reasoning_stop=509
    )
    with pytest.raises(ItemError, match="too_long.*516 tokens.*512 positions"):
        label(builtin, long)


def test_every_kind_declares_itself() -> None:
    assert "occlusion" in label_kinds.names()
    for kind in label_kinds.members():
        assert all((kind.source, kind.unit, kind.sign, kind.version >= 1))


@pytest.mark.parametrize("kind", ["occlusion", "knockout", "eviction_kl"])
def test_layers_that_keep_no_entries_are_named(llama: LoadedModel, kind: str) -> None:
    """A model whose second layer is a state-space one is refused, with that layer."""
    shape = dataclasses.replace(llama.shape, layer_types=("full_attention", "mamba", "full_attention"))
    odd = dataclasses.replace(llama, shape=shape)
    with pytest.raises(CfkvError, match=f"label kind {kind} cannot use tiny-llama: layers 1 are mamba"):
        label_kinds.get(kind)(odd, LabelConfig(kind=kind), Execution(), exact_match)


def test_kernels_that_take_no_mask_are_refused(llama: LoadedModel) -> None:
    """Flash attention hides nothing."""
    flash = dataclasses.replace(llama, attn_implementation="flash_attention_2")
    with pytest.raises(CfkvError, match="flash_attention_2 cannot hide single entries.*use sdpa or eager"):
        Occlusion(flash, CONFIG, Execution(), exact_match)
