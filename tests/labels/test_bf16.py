"""bfloat16: what rounding flips is decided by a narrow margin or lies under the null floor, and is counted."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cfkv import store
from cfkv.config import LabelConfig
from cfkv.labels._packed import Counterfactual
from cfkv.labels._replay import Replay
from cfkv.labels._scope import Scope
from cfkv.labels._windows import windows
from cfkv.margins import margin_text, narrow_margin
from cfkv.models.loading import LoadedModel
from cfkv.schemas import TOKEN_LABELS, WINDOWS
from pipelines.bf16_check import KINDS, compare, make, recipe

SPACINGS = 4


def test_the_narrow_margin_is_four_spacings_of_a_logit_between_16_and_32() -> None:
    """float32 has the bound of its exactness tests instead, which is wider than that."""
    below = torch.tensor(17.0)
    for dtype in (torch.bfloat16, torch.float16):
        spacing = torch.nextafter(below.to(dtype), torch.tensor(32.0, dtype=dtype)).float() - below
        assert narrow_margin(str(dtype)) == SPACINGS * float(spacing)
    assert narrow_margin("float32") == 1e-4
    assert [margin_text(dtype) for dtype in ("float32", "torch.bfloat16", "odd")] == ["1e-4", "0.5", "1e-4"]


def test_built_in_model(tmp_path: Path) -> None:
    """Three traces through the real stages, fast and literal: each flip that differs has its reason."""
    plan = recipe("builtin", "bfloat16", 3, None)
    labels = tuple(LabelConfig(kind=kind, window=8, stride=8, max_new_tokens=12) for kind in KINDS)
    fast, literal = make(tmp_path, plan.model_copy(update={"label": labels}))
    found = compare(fast, literal, "bfloat16")
    occlusion, null = found["occlusion"], found["null"]
    print(
        f"{occlusion['windows']} windows: {occlusion['flips_differ']} flips differ, of them "
        f"{occlusion['flips_differ_narrow']} with a narrow margin and "
        f"{occlusion['flips_differ_within_null_floor']} within the null floor; {null['flips_differ']} null flips differ"
    )
    assert occlusion["windows"] > 50
    assert occlusion["flipped"][0] > 5
    assert found["narrow_margin"] == 0.5
    for kind in (occlusion, null):
        assert kind["flips_differ_unexplained"] == 0
        assert kind["in_one_run_only"] == 0
        assert kind["largest_margin_difference"] < SPACINGS * 0.125
    assert null["flipped"] == found["null_windows_flipped"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_random_models(make_tiny: Callable[[str, str], LoadedModel], family: str) -> None:
    """Their logits lie close, so that tokens do differ; only by margins within four spacings of the largest logit."""
    base = make_tiny(family, "sdpa")
    model = copy.deepcopy(base.model).to(torch.bfloat16)
    loaded = dataclasses.replace(base, model=model, dtype=torch.bfloat16)
    differ, widest, replays, largest = 0, 0.0, 0, 0.0
    for seed in range(4):
        ids = torch.randint(9, 100, (46,), generator=torch.Generator().manual_seed(seed)).tolist()
        context = (*ids, *loaded.tokenizer.encode("</think> \\boxed{"))
        with torch.inference_mode():
            largest = max(largest, float(model(torch.tensor([context])).logits.abs().max()))
        control = Counterfactual(len(context) - 1, context[-1:])
        draft = replay(loaded, context, (9,)).literal(control).token_ids
        rows = [
            Counterfactual(first, (*[0] * (stop - first), *context[stop:]))
            for first, stop in windows(6, 46, 4, 4)
        ]
        for row, fast in zip(rows, replay(loaded, context, draft).fast(rows, draft), strict=True):
            literal = replay(loaded, context, draft).literal(row)
            replays += 1
            if fast.token_ids != literal.token_ids:
                differ += 1
                widest = max(widest, min(fast.min_margin, literal.min_margin))
    spacing = 2.0 ** (math.floor(math.log2(largest)) - 7)
    print(
        f"{family}: {differ} of {replays} replays differ, by margins up to {widest:g} (spacing {spacing:g})"
    )
    assert differ < replays / 4
    assert widest < SPACINGS * spacing < narrow_margin("bfloat16")


def replay(loaded: LoadedModel, context: tuple[int, ...], answer: tuple[int, ...]) -> Replay:
    """An engine for answers inside an open box."""
    return Replay(
        loaded=loaded,
        context=context,
        answer=answer,
        prefix="\\boxed{",
        max_new_tokens=24,
        chunk_size=512,
        memory=2**31,
        scope=Scope.parse("all", "all", loaded.shape),
    )


def test_what_differs_is_counted_by_its_reason(tmp_path: Path) -> None:
    """Null floor 0.1. Window 0: same. 1: differs by a margin of 0. 2: differs within the floor. 3: differs, and why is
    not known. 4: another answer, both flips. 5: stands in the fast run alone."""
    fast = [(False, "a", 4.0, 0.0), (True, "b", 0.0, 0.5), (True, "b", 4.0, 0.05), (True, "b", 4.0, 0.5)]
    fast += [(True, "b", 0.25, 0.5), (False, "a", 4.0, 0.0)]
    literal = [(False, "a", 4.5, 0.0), *[(False, "a", 4.0, 0.4)] * 3, (True, "c", 0.5, 0.5)]
    for name, windows_of in (("fast", fast), ("literal", literal)):
        for kind, chosen in (("occlusion", windows_of), ("null", [(False, "a", 4.0, -0.1)])):
            rows = [
                {
                    **{"trace_id": "t", "kind": kind, "scope": "all", "window_index": index, "status": "ok"},
                    **dict(zip(("flipped", "answer", "min_margin", "delta_nll"), values, strict=True)),
                }
                for index, values in enumerate(chosen)
            ]
            store.write_part(tmp_path / name, WINDOWS, kind, 0, store.to_arrow(WINDOWS, rows), "f")
            labels = [{"trace_id": "t", "problem_id": "p", "kind": kind, "status": "excluded"}]
            store.write_part(
                tmp_path / name, TOKEN_LABELS, kind, 0, store.to_arrow(TOKEN_LABELS, labels), "f"
            )
    found = compare(tmp_path / "fast", tmp_path / "literal", "bfloat16")
    assert found["occlusion"] == {
        "windows": 5,
        "flipped": [4, 1],
        "decided_by_a_narrow_margin": 2,
        "answers_differ": 4,
        "flips_differ": 3,
        "flips_differ_narrow": 1,
        "flips_differ_within_null_floor": 1,
        "flips_differ_unexplained": 1,
        "widest_margin_where_answers_differ": 4.0,
        "largest_margin_difference": 0.5,
        "largest_delta_nll_difference": 0.35,
        "excluded_by_control": [1, 1],
        "in_one_run_only": 1,
        "within_null_floor": [3, 1],
        "flipped_within_null_floor": [1, 0],
    }
    assert found["null_windows_flipped"] == [0, 0]
