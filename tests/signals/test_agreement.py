"""PAGE's head agreement: known sets, both routes, a dense reference, and the stage's tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from dense import dense
from torch import Tensor

import cfkv
from cfkv.config import Execution, ProbeConfig, Recipe, TraceConfig
from cfkv.errors import CfkvError
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.session import Session
from cfkv.signals._agreement import (
    LayerAgreement,
    drop,
    drop_strict,
    gate_signals,
    head_pairs,
    jaccard,
    layer_agreement,
    top_sets,
)
from cfkv.signals._last_rows import agreement_profile

TOKENS = 70


def rows_of(*sets: range) -> Tensor:
    """Attention rows that are uniform on the given sets of 200 tokens."""
    rows = torch.zeros(len(sets), 200)
    for row, own in zip(rows, sets, strict=True):
        row[list(own)] = 1 / len(own)
    return rows


def agreement(rows: Tensor, top: int = 32) -> LayerAgreement:
    keys = torch.randn(1, rows.shape[1], 4, generator=torch.Generator().manual_seed(0))
    return layer_agreement(rows, keys, head_pairs(len(rows), None, (0,)), top)


@pytest.mark.parametrize(
    ("shared", "expected"), [(32, 1.0), (0, 0.0), (8, 1 / 7), (16, 1 / 3), (24, 0.6), (31, 31 / 33)]
)
def test_known_overlaps(shared: int, expected: float) -> None:
    """Two heads with 32 tokens each, of which `shared` are the same."""
    found = agreement(rows_of(range(32), range(32 - shared, 64 - shared)))
    assert found.agreement == pytest.approx(expected, abs=1e-6)
    assert found.n_pairs == 1


def test_mean_over_pairs_and_order_of_heads() -> None:
    """Three heads: 16 shared, 0 shared, 16 shared, whatever their order; a layer of one head has no pair."""
    rows = rows_of(range(32), range(16, 48), range(32, 64))
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        assert agreement(rows[order]).agreement == pytest.approx((1 / 3 + 0 + 1 / 3) / 3, abs=1e-6)
    assert np.isnan(agreement(rows[:1]).agreement)


def test_ties_go_to_the_lower_place() -> None:
    rows = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1]])
    assert top_sets(rows, 4).tolist() == [[1, 3, 0, 2]]


def test_other_statistics_by_hand() -> None:
    """A uniform row over 32 of 200 tokens; keys of norm 1 and 3 in turn."""
    keys = torch.tensor([1.0, 3.0]).repeat(100)[None, :, None]
    found = layer_agreement(rows_of(range(32), range(32)), keys, head_pairs(2, None, (0,)), 16)
    assert found.entropy == pytest.approx(np.log(32) / np.log(200))
    assert found.top_mass == pytest.approx(0.5)
    assert found.max_share == pytest.approx(1 / 32)
    assert found.key_norm_spread == pytest.approx(0.5)


@pytest.mark.parametrize(("count", "equal", "strict"), [(28, 19, 18), (32, 22, 21), (36, 24, 24), (4, 3, 2)])
def test_both_drop_conventions(count: int, equal: int, strict: int) -> None:
    """L = 28: early 0-8, late 19-27 or 18-27 (methods 4)."""
    values = [float(layer**2) for layer in range(count)]
    early = np.mean(values[: count // 3])
    assert drop(values) == pytest.approx(early - np.mean(values[equal:]))
    assert drop_strict(values) == pytest.approx(early - np.mean(values[strict:]))


def test_too_few_layers_have_no_drop() -> None:
    found = gate_signals([agreement(rows_of(range(32), range(32)))], 200, 32)
    assert np.isnan(found.drop)
    assert found.floor == pytest.approx(32 / (400 - 32))


def test_drawn_pairs() -> None:
    """Without repeats, the same each time, others for another layer; all pairs where that is fewer."""
    pairs = head_pairs(12, 10, (0, 3))
    assert len({tuple(pair) for pair in pairs.tolist()}) == 10
    assert (pairs[:, 0] < pairs[:, 1]).all()
    assert np.array_equal(pairs, head_pairs(12, 10, (0, 3)))
    assert not np.array_equal(pairs, head_pairs(12, 10, (0, 4)))
    assert head_pairs(12, 999, (0,)).tolist() == [list(pair) for pair in combinations(range(12), 2)]
    assert head_pairs(12, 1, (0,)).shape == (1, 2)


def draw(loaded: LoadedModel, count: int = TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(9, loaded.shape.vocabulary, (count,), generator=generator).tolist()


def numbers(profile: dict[int, LayerAgreement]) -> np.ndarray:
    return np.array([list(asdict(layer).values()) for layer in profile.values()])


def test_profile_equals_the_dense_reference(
    tiny: LoadedModel, make_tiny: Callable[[str, str], LoadedModel]
) -> None:
    """Sets of Python integers, one pair of heads at a time."""
    ids = draw(tiny)
    trace = dense(make_tiny(tiny.name.removeprefix("tiny-"), "eager"), ids)
    profile = agreement_profile(tiny, ids, queries=16, top=8, chunk_size=30)
    assert list(profile) == list(range(tiny.shape.num_layers))
    for layer, own in zip(trace.layers, profile.values(), strict=True):
        rows = layer.attention[:, -16:].mean(axis=1)
        sets = [set(np.argsort(-row, kind="stable")[:8].tolist()) for row in rows]
        pairs = [len(a & b) / len(a | b) for a, b in combinations(sets, 2)]
        positive = np.where(rows > 0, rows, 1)
        norms = np.sqrt((layer.keys**2).sum(-1))
        expected = [
            np.mean(pairs),
            len(pairs),
            (-(positive * np.log(positive)).sum(axis=-1) / np.log(TOKENS)).mean(),
            np.sort(rows, axis=-1)[:, -8:].sum(axis=-1).mean(),
            rows.max(axis=-1).mean(),
            (norms.std(axis=-1) / norms.mean(axis=-1)).mean(),
        ]
        assert np.allclose(list(asdict(own).values()), expected, atol=1e-5)


def test_both_routes_agree(tiny: LoadedModel) -> None:
    """At any chunk size, with a window that lies across chunks; also from a cache that is left as it was."""
    ids = draw(tiny)
    one = numbers(agreement_profile(tiny, ids))
    cache = compat.new_cache()
    with torch.inference_mode():
        compat.forward(tiny.model, torch.tensor([ids]), cache)
    held = [compat.cache_keys_values(cache, layer)[0].clone() for layer in range(tiny.shape.num_layers)]
    others = {
        "two passes": agreement_profile(tiny, ids, two_pass=True),
        "two passes by chunks": agreement_profile(tiny, ids, two_pass=True, chunk_size=7),
        "one pass by chunks": agreement_profile(tiny, ids, chunk_size=13),
        "given cache": agreement_profile(tiny, ids, cache=cache),
    }
    for name, profile in others.items():
        largest = float(np.abs(numbers(profile) - one).max())
        print(f"{tiny.name} {name}: {largest:.2e}")
        assert largest < 1e-5
    for layer, keys in enumerate(held):
        assert torch.equal(compat.cache_keys_values(cache, layer)[0], keys)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33])
def test_short_inputs(llama: LoadedModel, count: int) -> None:
    """The window and the sets are the whole input."""
    for two_pass in (False, True):
        profile = agreement_profile(llama, draw(llama, count), two_pass=two_pass)
        assert len(profile) == llama.shape.num_layers
        if count <= 32:
            assert all(layer.agreement == 1 for layer in profile.values())


def test_sampled_layers_and_pairs(tiny: LoadedModel) -> None:
    ids = draw(tiny)
    whole, some = agreement_profile(tiny, ids, top=8), agreement_profile(tiny, ids, top=8, stride=2, pairs=2)
    assert list(some) == list(range(0, tiny.shape.num_layers, 2))
    assert {layer.n_pairs for layer in some.values()} == {2}
    for layer, own in some.items():
        assert own.entropy == whole[layer].entropy


def test_jaccard_of_all_pairs_at_once() -> None:
    sets = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5], [6, 7, 8, 9]])
    expected = torch.tensor([[1, 1 / 3, 0], [1 / 3, 1, 0], [0, 0, 1.0]])
    assert torch.allclose(jaccard(sets, 10), expected)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Two imported traces."""
    path = tmp_path / "traces.jsonl"
    texts = ["now we go on %m =6 6 ; </think> \\boxed{ R1=1 }", "so keep this </think> \\boxed{ R1=2 }"]
    rows = [
        {"problem_id": f"p{i}", "prompt": "ask 4 <think>", "response": text, "answer": "R1=1"}
        for i, text in enumerate(texts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return Recipe(
        trace=TraceConfig(mode="import", path=path, part_size=1),
        probe=ProbeConfig(groups=("logits", "agreement"), agreement_top=4, agreement_input="context"),
    )


def test_the_stage(recipe: Recipe, tmp_path: Path, builtin: LoadedModel) -> None:
    """A row per input and layer, one per input; run again it does nothing; another k is refused."""
    session = Session.open(tmp_path / "run", recipe, Execution(device="cpu"))
    session.trace()
    result = session.probe()
    assert (result.statuses, result.parts_written) == ({"ok": 4}, 4)
    run = cfkv.load(tmp_path / "run")
    layers, inputs = run.head_agreement.collect(), run.gate_signals.collect()
    assert layers.select("trace_id", "layer").rows() == [(f"p{i}/0", j) for i in range(2) for j in range(4)]
    trace = run.traces.collect().row(0, named=True)
    ids = trace["token_ids"][: trace["answer_start"]]
    profile = agreement_profile(builtin, ids, top=4)
    assert layers["agreement"].to_list()[:4] == pytest.approx([own.agreement for own in profile.values()])
    gate = asdict(gate_signals(list(profile.values()), len(ids), 4))
    first = inputs.row(0, named=True)
    assert {name: first[name] for name in gate} == pytest.approx(gate)
    assert (first["n_tokens"], first["top"], first["queries"], first["input"]) == (len(ids), 4, 32, "context")
    assert run.signal_groups().keys() == {"logits"}
    assert session.probe().parts_written == 0
    other = recipe.model_copy(update={"probe": recipe.probe.model_copy(update={"agreement_top": 5})})
    with pytest.raises(CfkvError, match="config.agreement_top: 4 -> 5"):
        Session.open(tmp_path / "run", other, Execution(device="cpu")).probe()
