"""Configurations: canonical JSON, fingerprints, recipes, --set, differences, and every message."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import cfkv
from cfkv import config
from cfkv.config import (
    BenchConfig,
    Config,
    CorrelateConfig,
    Execution,
    LabelConfig,
    ModelConfig,
    OfflineConfig,
    OnlineConfig,
    ProbeConfig,
    Recipe,
    ReportConfig,
    TraceConfig,
    apply_settings,
    canonical_json,
    differences,
    fingerprint,
    load_recipe,
    parse_recipe,
)
from cfkv.errors import CfkvError

RESULT_CONFIGS = (
    *(ModelConfig, TraceConfig, LabelConfig, ProbeConfig),
    *(CorrelateConfig, OfflineConfig, OnlineConfig, ReportConfig),
)
leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
tree = st.recursive(
    leaf,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def reordered(value: Any, generator: random.Random) -> Any:
    """The same JSON value with the keys of every mapping in another order."""
    if isinstance(value, dict):
        keys = list(value)
        generator.shuffle(keys)
        return {key: reordered(value[key], generator) for key in keys}
    return [reordered(entry, generator) for entry in value] if isinstance(value, list) else value


def refusal(data: Any) -> str:
    with pytest.raises(CfkvError) as caught:
        parse_recipe(data, "r.yaml")
    return str(caught.value)


def set_refusal(*given_settings: str) -> str:
    with pytest.raises(CfkvError) as caught:
        apply_settings(Recipe(), list(given_settings))
    return str(caught.value)


@settings(deadline=None, max_examples=60)
@given(tree, st.randoms(use_true_random=False))
def test_canonical_json_ignores_the_order_of_keys(value: Any, generator: random.Random) -> None:
    """Equal values give equal text, which reads back as the value and holds no white space of its own."""
    other = reordered(value, generator)
    assert canonical_json(value) == canonical_json(other)
    assert fingerprint(value) == fingerprint(other)
    assert json.loads(canonical_json(value)) == value


@settings(deadline=None, max_examples=60)
@given(tree, tree)
def test_different_values_have_different_fingerprints(first: Any, second: Any) -> None:
    assert (canonical_json(first) == canonical_json(second)) == (fingerprint(first) == fingerprint(second))


def test_fingerprint_is_pinned() -> None:
    """printf '%s' '{"a":[1,null,"é"],"b":0.5}' | b2sum -l 64: runs of older versions must still match."""
    value = {"b": 0.5, "a": [1, None, "é"]}
    assert canonical_json(value) == '{"a":[1,null,"é"],"b":0.5}'
    assert fingerprint(value) == "f9d59bb31ac82374"


def test_canonical_of_a_configuration() -> None:
    assert ReportConfig(traces=7).canonical() == '{"traces":7}'
    assert LabelConfig().canonical() == canonical_json(json.loads(LabelConfig().model_dump_json()))


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": 1}, {"a": 1}, []),
        (
            {"a": 1, "b": {"c": [1, 2], "d": "x"}},
            {"a": 2, "b": {"c": [1], "d": "x"}},
            ["a: 1 -> 2", "b.c: [1, 2] -> [1]"],
        ),
        ({"a": None}, {}, ["a: None -> absent"]),
        ({}, {"b": {"c": 1}}, ["b: absent -> {'c': 1}"]),
        ({"b": {"c": 1}}, {"b": 3}, ["b: {'c': 1} -> 3"]),
        ({"z": 1, "a": {"k": 0}}, {"z": 2, "a": {"k": 5}}, ["a.k: 0 -> 5", "z: 1 -> 2"]),
    ],
)
def test_differences_by_hand(old: Any, new: Any, lines: list[str]) -> None:
    assert differences(old, new) == lines


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.text(max_size=3), tree, max_size=3),
    st.dictionaries(st.text(max_size=3), tree, max_size=3),
)
def test_differences_are_empty_only_for_equal_values(old: Any, new: Any) -> None:
    """Else a refused stage would be refused without a reason."""
    assert (differences(old, new) == []) == (old == new)


def test_every_field_is_described() -> None:
    """The command line's help and the recipes are made from these."""
    for kind in (*RESULT_CONFIGS, Execution):
        assert kind.__doc__
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.__name__}.{name}"
            assert field.description.endswith((".", ")")), f"{kind.__name__}.{name}"


def test_recipe_has_a_section_for_each_result_configuration() -> None:
    sections = {getattr(f.annotation, "__args__", [f.annotation])[0] for f in Recipe.model_fields.values()}
    assert sections == set(RESULT_CONFIGS)


def test_execution_is_in_no_fingerprint() -> None:
    """No name of it is a result field, and no stage's identity mentions it."""
    for kind in RESULT_CONFIGS:
        assert not set(kind.model_fields) & set(Execution.model_fields), kind.__name__
    seen = 0
    for path in Path(cfkv.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Stage":
                (identity,) = [keyword.value for keyword in node.keywords if keyword.arg == "config"]
                assert "execution" not in ast.unparse(identity).lower(), path
                seen += 1
    assert seen >= 4  # trace, label, probe, correlate


def test_configurations_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        LabelConfig().window = 3  # type: ignore[misc]


def test_a_recipe_is_read(tmp_path: Path) -> None:
    """Sections that are not named keep their defaults; one label section needs no list."""
    path = tmp_path / "r.yaml"
    path.write_text("trace: {dataset: gsm8k, limit: 30}\nlabel:\n  window: 8\n  stride: 4\n")
    recipe = load_recipe(path)
    assert (recipe.trace.dataset, recipe.trace.limit, recipe.trace.seed) == ("gsm8k", 30, 0)
    assert recipe.label == (LabelConfig(window=8, stride=4),)
    assert recipe.probe == ProbeConfig()
    path.write_text("")
    assert load_recipe(path) == Recipe()
    assert parse_recipe(json.loads(recipe.model_dump_json()), "again") == recipe


def test_a_recipe_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        CfkvError, match=r"recipe '.*none\.yaml' does not exist; recipes are YAML files, see pipelines/"
    ):
        load_recipe(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("trace:\n  limit: [1\n")
    with pytest.raises(CfkvError, match=r"bad\.yaml is not valid YAML: .*line 3, column 1"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (
            [1],
            [
                "r.yaml must be a mapping of stages (model, trace, label, probe, correlate, offline, online, report), "
                "not [1]"
            ],
        ),
        ("trace", ["must be a mapping of stages", "not 'trace'"]),
        (
            {"trac": {}},
            ["r.yaml: unknown key 'trac': did you mean 'trace'?", "legal: correlate, label, model"],
        ),
        ({"trace": {"limt": 3}}, ["unknown key 'trace.limt': did you mean 'trace.limit'", "trace.seed"]),
        ({"label": {"windw": 3}}, ["unknown key 'label.0.windw': did you mean 'label.0.window'"]),
        ({"label": [{}, {"kind": "b", "x": 3}]}, ["unknown key 'label.1.x'", "legal: label.1.age_bands"]),
        ({"trace": {"limit": "many"}}, ["r.yaml: trace.limit = 'many': Input should be a valid integer"]),
        ({"trace": {"limit": 0}}, ["trace.limit = 0: Input should be greater than or equal to 1"]),
        (
            {"trace": {"mode": "gen"}},
            ["trace.mode = 'gen': Input should be 'generate', 'worked_solution' or"],
        ),
        ({"trace": 3}, ["r.yaml: trace = 3: Input should be a valid dictionary"]),
        ({"model": {"trust_remote_code": "maybe"}}, ["model.trust_remote_code = 'maybe'", "boolean"]),
        ({"label": [{}, {}]}, ["r.yaml: 2 label sections have kind 'occlusion'", "remove the others"]),
    ],
)
def test_recipe_messages(data: Any, parts: list[str]) -> None:
    """Where, the value seen, what is legal."""
    message = refusal(data)
    assert [part for part in parts if part not in message] == [], message


def test_set_overrides_one_value_each() -> None:
    """Read as YAML; the rest stays; later ones win."""
    base = Recipe(trace=TraceConfig(limit=5, seed=3))
    done = apply_settings(
        base, ["trace.limit=9", "trace.limit=7", "model.revision=main", "probe.groups=[kv]"]
    )
    assert (done.trace.limit, done.trace.seed) == (7, 3)
    assert (done.model.revision, done.probe.groups) == ("main", ("kv",))
    assert apply_settings(base, ["trace.limit="]).trace.limit is None
    assert apply_settings(base, ["trace.answer_prefix='a=b'"]).trace.answer_prefix == "a=b"
    assert apply_settings(base, []) == base
    assert base.trace.limit == 5


def test_set_reaches_labels() -> None:
    """All of them without an index, one with it."""
    base = Recipe(label=(LabelConfig(kind="occlusion"), LabelConfig(kind="knockout")))
    assert [entry.window for entry in apply_settings(base, ["label.window=8"]).label] == [8, 8]
    assert [entry.window for entry in apply_settings(base, ["label.1.window=8"]).label] == [32, 8]
    assert [entry.kind for entry in apply_settings(base, ["label.1.window=8"]).label] == [
        "occlusion",
        "knockout",
    ]


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("trace.limit", ["--set 'trace.limit' has no '='; write --set section.key=value"]),
        ("trac.limit=3", ["unknown key 'trac': did you mean 'trace'?"]),
        ("trace.limt=3", ["--set: unknown key 'trace.limt': did you mean 'trace.limit'"]),
        ("trace.limit=x", ["--set: trace.limit = 'x': Input should be a valid integer"]),
        ("label.1.window=3", ["--set label.1.window: '1' is not an index below 1"]),
        ("label.x.window=3", ["'x' is not an index below 1"]),
        ("trace.limit.x=3", ["--set trace.limit.x: goes below None, which has no keys", "section.key=value"]),
        ("trace.limit.x.y=3", ["goes below None"]),
        ("model.model.x=3", ["goes below 'builtin', which has no keys"]),
        ("probe.groups.0=kv", ["goes below 'hidden'"]),
        ("trace.limit=[1", ["--set trace.limit=[1: '[1' is not valid YAML; quote it"]),
        ("=3", ["unknown key ''", "legal: correlate"]),
    ],
)
def test_set_messages(setting: str, parts: list[str]) -> None:
    message = set_refusal(setting)
    assert [part for part in parts if part not in message] == [], message


def test_all_configurations_are_covered_here() -> None:
    """A new configuration class must join one of the lists above."""
    kinds = {kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, Config)}
    assert kinds - {Config} == {*RESULT_CONFIGS, BenchConfig, Execution, Recipe}
