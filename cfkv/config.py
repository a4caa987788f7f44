"""Frozen stage configurations, their canonical JSON and their fingerprint.

Each field is declared here once; the command line and the recipe files read the same declarations. A stage's
fingerprint covers its configuration (everything that can change a result), not `Execution` (everything that
cannot: device, batch size, number of processes).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cfkv.errors import CfkvError, unknown_name

ABSENT = object()


def percent(text: str) -> float:
    """`12.5%` as .125; above 0 %, below 100 %.

    Raises
    ------
    ValueError
        For anything else.
    """
    number = text.removesuffix("%")
    try:
        share = float(number) / 100 if number != text else math.nan
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise ValueError(f"{text!r} is no percentage above 0% and below 100%, such as 12.5%")
    return share


class Config(BaseModel):
    """Base of all configurations: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def canonical(self) -> str:
        """The configuration as JSON with sorted keys and no spaces."""
        return canonical_json(self.model_dump(mode="json"))


class ModelConfig(Config):
    """Which model, and how it is run."""

    model: str = Field("builtin", description="builtin, smollm2, a hub id, a local folder, or a .gguf file.")
    revision: str | None = Field(None, description="Hub revision: branch, tag or commit.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Compute dtype; auto is float32 on a CPU and the checkpoint's own on a GPU."
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "sdpa", description="Attention kernel."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with a checkpoint. Off: leave it off."
    )


class TraceConfig(Config):
    """Where traces come from."""

    dataset: str = Field("registers", description="Problem source; `cfkv ls problems` lists them.")
    path: Path | None = Field(
        None, description="JSONL or Parquet file of the dataset, or of the traces with --mode import."
    )
    mode: Literal["generate", "worked_solution", "import"] = Field(
        "generate",
        description="generate: the model writes everything. worked_solution: the dataset's solution is placed "
        "in the think block and the model restates the answer. import: responses from --path.",
    )
    limit: int | None = Field(None, ge=1, le=2**31 - 1, description="Use only the first N problems.")
    min_reasoning: int = Field(
        1, ge=0, description="Fail traces whose reasoning has fewer tokens than this (counted as `skipped`)."
    )
    max_new_tokens: int = Field(2048, ge=1, description="Cap on the generated tokens of a trace.")
    answer_max_new_tokens: int = Field(
        512, ge=1, description="Cap on the answer restated after a worked solution."
    )
    answer_prefix: str | None = Field(
        None,
        description="Text placed after the boundary before the answer is generated; the default is "
        r"'The final answer is \boxed{' for worked_solution and nothing otherwise.",
    )
    instruction: str | None = Field(
        None,
        description="Sentence appended to the question; the default asks for a boxed answer where the model has "
        "a chat template and writes the trace itself, and is empty otherwise.",
    )
    boundary: Literal["auto", "think_end", "boxed", "tail"] = Field(
        "auto",
        description=r"Where the reasoning of a written or imported trace ends: at the last </think>, at the last "
        r"\boxed{, or 64 tokens before the end; auto takes the first that applies.",
    )
    answer_match: Literal["exact", "math"] = Field(
        "exact", description="Grade by normalised string, or by math-verify (extra `math`)."
    )
    seed: int = Field(0, ge=0, description="Root seed; every item derives its own generator from it.")
    part_size: int = Field(
        16, ge=1, description="Problems per Parquet part: the unit of work and of resuming."
    )


class LabelConfig(Config):
    """One kind of counterfactual label."""

    kind: str = Field("occlusion", description="Label kind; `cfkv ls labels` lists them.")
    window: int = Field(32, ge=1, description="Tokens per window.")
    stride: int = Field(16, ge=1, description="Tokens between the starts of windows.")
    replacement: str = Field(
        "auto",
        description="For occlusion, the token put in place of a window's tokens: pad, eos, reserved (a special one "
        "that nothing uses), or a token id. auto: pad if it is a token of its own, else reserved. Beware: R1-style "
        "tokenizers reuse the end-of-text token as pad, which ends the text inside the context.",
    )
    layers: str = Field(
        "all", description="For knockout and eviction_kl, where entries are hidden: all, 4-11, or 0,2,5-7."
    )
    kv_heads: str = Field("all", description="The same for KV heads.")
    block: int = Field(1, ge=1, description="For eviction_kl, the tokens that are removed together.")
    every: int = Field(64, ge=1, description="For eviction_kl, reasoning tokens between two checkpoints.")
    steps: str = Field(
        "every",
        description="For eviction_kl, checkpoints: every, or reasoning tokens such as 64,200 and the word boundary.",
    )
    horizon: int = Field(8, ge=1, description="For eviction_kl, tokens that are replayed after a checkpoint.")
    candidates: str = Field(
        "all",
        description="For eviction_kl, blocks that are removed: all, stratified (drawn at random within bands of "
        "age), or a JSONL file of trace_id, blocks [[start, stop], ...] and, if only there, step.",
    )
    age_bands: int = Field(8, ge=1, description="For stratified candidates, bands of equal width in age.")
    per_band: int = Field(8, ge=1, description="For stratified candidates, blocks drawn from each band.")
    pairs: int = Field(
        0,
        ge=0,
        description="For eviction_kl, pairs of candidates that are drawn and removed at each checkpoint.",
    )
    seed: int = Field(0, ge=0, description="For eviction_kl, seed of what is drawn.")
    max_new_tokens: int = Field(512, ge=1, description="Cap on a regenerated answer.")

    @field_validator("replacement", mode="before")
    @classmethod
    def _number_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    answer_match: Literal["exact", "math"] = Field(
        "exact", description="When two answers are the same: normalised string, or math-verify."
    )


class ProbeConfig(Config):
    """Which signals are streamed."""

    groups: tuple[str, ...] = Field(
        ("hidden", "kv"),
        description="Signal groups, probed in one pass and stored apart; `cfkv ls signals` lists them. "
        "agreement: of heads, per input.",
    )
    per_head: bool = Field(False, description="Keep the KV heads beside their mean.")
    agreement_input: Literal["prompt", "context", "trace"] = Field(
        "prompt",
        description="For the group agreement, the tokens measured: the prompt, all before the answer, or the trace.",
    )
    agreement_top: int = Field(32, ge=1, description="For agreement, tokens in a head's top set (k).")
    agreement_queries: int = Field(32, ge=1, description="For agreement, last queries averaged (w).")
    agreement_bins: int = Field(
        3, ge=2, description="For agreement, bins of layers, the first held against the last."
    )
    agreement_stride: int = Field(1, ge=1, description="For agreement, measure every n-th layer.")
    agreement_pairs: int | None = Field(
        None, ge=1, description="For agreement, head pairs drawn per layer; default all."
    )
    agreement_seed: int = Field(0, ge=0, description="For agreement, seed of the drawn pairs.")
    agreement_route: Literal["one_pass", "two_pass"] = Field(
        "one_pass",
        description="For agreement: observe the prefill, or forward its last queries again over the cut cache.",
    )

    @field_validator("groups")
    @classmethod
    def _split_at_commas(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = (name.strip() for text in value for name in text.split(","))
        return tuple(dict.fromkeys(name for name in names if name))


class CorrelateConfig(Config):
    """How signals are held against labels."""

    smoothings: tuple[Literal["raw", "ema", "rolling_mean", "rolling_z"], ...] = Field(
        ("raw", "ema", "rolling_mean", "rolling_z"), description="Causal smoothings of a signal."
    )
    ema_alpha: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Weight of the newest value in the EMA (the paper says only alpha = 0.9).",
    )
    rolling_window: int = Field(64, ge=2, description="Tokens in the trailing window of mean and z-score.")
    high_damage: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="For kinds with a value and no threshold (eviction_kl), the share of a trace's tested tokens with "
        "the largest value that is called high damage.",
    )
    draws: int = Field(2000, ge=100, description="Bootstrap draws over traces for the AUROC.")
    level: float = Field(0.95, gt=0, lt=1, description="Confidence level of all intervals.")
    seed: int = Field(0, ge=0, description="Seed of the bootstrap.")


def _split_outside_brackets(value: tuple[str, ...]) -> tuple[str, ...]:
    names = (name.strip() for text in value for name in re.split(r",(?![^\[]*\])", text))
    return tuple(dict.fromkeys(name for name in names if name))


class OfflineConfig(Config):
    """How policies are held against labels, without decoding."""

    policies: tuple[str, ...] = Field(
        ("all",),
        description="Names, such as h2o or h2o:recent_share=0.25, or all that choose by a score; `cfkv ls policies` "
        "lists them. random and position are always there.",
    )
    kinds: tuple[str, ...] = Field(
        ("all",), description="Label kinds of the run; all: every one but the control `null`."
    )
    checkpoints: tuple[str, ...] = Field(
        ("end",),
        description="When the cache is scored: end (the last token before the answer), or a share of the reasoning "
        "such as 50%.",
    )
    budgets: tuple[str, ...] = Field(
        ("12.5%", "25%", "50%"),
        description="Shares of the candidates that are kept, rounded down, at least one.",
    )
    high_damage: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="As for correlate: the share of a graded kind's tokens that is important.",
    )
    correction: Literal["holm", "benjamini_hochberg"] = Field(
        "holm", description="Of p-values over the policies of a measure."
    )
    draws: int = Field(
        10_000,
        ge=100,
        description="Bootstrap draws over problems. No p-value is below 2 / (draws + 1) times the policies.",
    )
    level: float = Field(0.95, gt=0, lt=1, description="Confidence level of all intervals.")
    seed: int = Field(0, ge=0, description="Seed of random scores, of shuffled labels, and of the bootstrap.")

    @field_validator("policies", "kinds", "checkpoints", "budgets")
    @classmethod
    def _split(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        found = _split_outside_brackets(value)
        if not found:
            raise ValueError("at least one is needed")
        return found

    @field_validator("checkpoints")
    @classmethod
    def _end_or_percent(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            if text != "end":
                percent(text)
        return value

    @field_validator("budgets")
    @classmethod
    def _percent(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            percent(text)
        return value


class OnlineConfig(Config):
    """Which policies are run at which budgets."""

    policies: tuple[str, ...] = Field(
        ("streaming_llm", "h2o", "tova", "snapkv_decode", "r_kv", "knorm", "keydiff", "epikv", "avokv_e"),
        description="Names, such as h2o or h2o:recent_share=0.25, or all; `cfkv ls policies` lists them. full and "
        "random are always there. epikv:layers=from:RUN takes the layers that RUN's correlations found.",
    )
    budgets: tuple[str, ...] = Field(
        ("12.5%", "25%", "50%"),
        description="512 (tokens per KV head, all in), 25% (of what follows the prompt, beside it), 50%prompt, 64MiB.",
    )
    mode: Literal["forced", "free"] = Field(
        "forced",
        description="forced: the trace's own reasoning is fed, and only the answer is generated; free: the model "
        "writes everything.",
    )
    items: Literal["auto", "correct", "all"] = Field(
        "auto",
        description="Traces that are run: all, or those that are correct; auto: correct ones when forced, else all.",
    )
    label: str = Field("occlusion", description="Label kind that oracle policies are made from.")
    positions: Literal["absolute", "compact", "slot"] = Field(
        "absolute",
        description="Rotary position of a new token: its own, or the number of cached tokens, with kept keys rotated "
        "together (compact) or as they are (slot).",
    )
    samples: int = Field(1, ge=1, description="Answers per item; 1 is greedy.")
    temperature: float = Field(0.6, gt=0, description="Of several samples.")
    seed: int = Field(0, ge=0, description="Seed of samples and of policies that draw.")
    max_new_tokens: int = Field(512, ge=1, description="Cap on what is generated.")
    simulate: bool = Field(
        False, description="Mask evicted entries instead of overwriting them; the same answers."
    )
    keep_sets: bool = Field(False, description="Store the positions that are left after each eviction.")
    answer_match: Literal["exact", "math"] = Field(
        "exact", description="When two answers are the same: normalised string, or math-verify."
    )
    level: float = Field(0.95, gt=0, lt=1, description="Confidence level of all intervals.")
    draws: int = Field(2000, ge=100, description="Bootstrap draws over problems.")
    correction: Literal["holm", "benjamini_hochberg"] = Field(
        "holm", description="Of p-values over the policies of a budget."
    )

    @field_validator("budgets", mode="before")
    @classmethod
    def _numbers_as_text(cls, value: Any) -> Any:
        return (
            [str(each) if type(each) is int else each for each in value] if isinstance(value, list) else value
        )

    @field_validator("policies", "budgets")
    @classmethod
    def _split(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _split_outside_brackets(value)


class ReportConfig(Config):
    """What the report shows."""

    traces: int = Field(4, ge=1, description="Traces shown with their tokens shaded by label.")


class BenchConfig(Config):
    """What a bench measures on."""

    path: Path | None = Field(
        None,
        description="GSM8K file whose worked solutions are used; the default is six problems of the bench's own.",
    )
    traces: int = Field(4, ge=1, description="For labels, traces per case.")
    window: int = Field(8, ge=1, description="For labels, tokens per window; half of it is the stride.")
    answer_tokens: int = Field(128, ge=2, description="For labels, cap of the long answers.")
    prefix: int = Field(512, ge=16, description="For oracle, cached tokens.")
    candidates: int = Field(64, ge=2, description="For oracle, single removals.")
    horizon: int = Field(8, ge=1, description="For oracle, tokens that are replayed.")
    tokens: int = Field(2048, ge=64, description="For probe, tokens of the input.")
    slots: int = Field(1024, ge=64, description="For decode, tokens per KV head.")
    steps: int = Field(32, ge=4, description="For decode, tokens that are written and timed.")
    positions: int = Field(4000, ge=128, description="For decode, length of the long text.")
    sequences: int = Field(8, ge=2, description="For decode, sequences of a batch.")
    chunk_size: int = Field(512, ge=1, description="Most tokens per forward.")


class Execution(Config):
    """How a stage is run. Nothing here may change a label, so it is in no fingerprint."""

    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps.")
    device_map: str | None = Field(None, description="auto: spread one model over the GPUs of this process.")
    batch_size: int = Field(16, ge=1, description="Sequences per forward where traces are generated.")
    chunk_size: int = Field(512, ge=1, description="Most tokens per forward everywhere else.")
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="GiB that packed queries of labels may take beyond weights and cache; the default is 2, or a "
        "quarter of a GPU's free memory.",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of torch; the default is 1 for a model too small to share out."
    )
    literal: bool = Field(
        False, description="Run the slow reference: batch 1, no shared prefix, no draft. Same labels."
    )
    shard: str = Field("0/1", description="i/n: this job does the i-th of n shares of the parts, from 0.")
    overwrite: bool = Field(False, description="Replace a stage that was run with another configuration.")
    dry_run: bool = Field(False, description="Print items, forwards, tokens and disk; run nothing.")


class Recipe(Config):
    """A whole experiment: one section per stage."""

    model: ModelConfig = ModelConfig()
    trace: TraceConfig = TraceConfig()
    label: tuple[LabelConfig, ...] = (LabelConfig(),)
    probe: ProbeConfig = ProbeConfig()
    correlate: CorrelateConfig = CorrelateConfig()
    offline: OfflineConfig = OfflineConfig()
    online: OnlineConfig = OnlineConfig()
    report: ReportConfig = ReportConfig()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no spaces, UTF-8 kept: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def fingerprint(value: Any) -> str:
    """16 hex digits of the BLAKE2b hash of `value`'s canonical JSON."""
    return hashlib.blake2b(canonical_json(value).encode(), digest_size=8).hexdigest()


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """One line `key: old -> new` for each leaf in which two JSON-like values differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines: list[str] = []
        for key in sorted({*old, *new}):
            place = f"{prefix}.{key}" if prefix else str(key)
            lines += differences(old.get(key, ABSENT), new.get(key, ABSENT), place)
        return lines
    before, after = ("absent" if value is ABSENT else repr(value) for value in (old, new))
    return [] if old == new else [f"{prefix}: {before} -> {after}"]


def load_recipe(path: Path) -> Recipe:
    """Read a YAML recipe; unknown keys and illegal values are errors that name the key and the nearest legal one."""
    if not path.is_file():
        raise CfkvError(f"recipe {str(path)!r} does not exist; recipes are YAML files, see pipelines/")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, RecursionError) as error:
        raise CfkvError(f"recipe {path} is not readable YAML: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise CfkvError(
            f"recipe {path} is not valid YAML: {where}{getattr(error, 'problem', None) or error}"
        ) from error
    return parse_recipe(data if data is not None else {}, str(path))


def parse_recipe(data: Any, origin: str) -> Recipe:
    """Validate a recipe given as plain data; `origin` names it in messages."""
    if not isinstance(data, Mapping):
        raise CfkvError(
            f"{origin} must be a mapping of stages ({', '.join(Recipe.model_fields)}), not {data!r}"
        )
    data = dict(data)
    if isinstance(data.get("label"), Mapping):
        data["label"] = [data["label"]]
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise validation_error(error, Recipe, origin) from error
    kinds = [config.kind for config in recipe.label]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise CfkvError(
                f"{origin}: {kinds.count(kind)} label sections have kind {kind!r}; a run directory holds one "
                "setting of a kind: remove the others, or put them in recipes of their own"
            )
    return recipe


def validation_error(error: ValidationError, model: type[BaseModel], origin: str) -> CfkvError:
    """Turn pydantic's first complaint into one message with the key, the value and what is legal."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        legal = _fields_at(model, first["loc"][:-1])
        return CfkvError(f"{origin}: {unknown_name('key', where, [_join(where, name) for name in legal])}")
    return CfkvError(f"{origin}: {where} = {first['input']!r}: {first['msg']}")


def _join(where: str, name: str) -> str:
    head, dot, _ = where.rpartition(".")
    return f"{head}{dot}{name}"


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        arguments = getattr(annotation, "__args__", None)
        model = arguments[0] if arguments else annotation  # type: ignore[assignment]
    return list(model.model_fields)


def apply_settings(recipe: Recipe, settings: list[str]) -> Recipe:
    """Apply `--set a.b=c` overrides; the value is read as YAML. Sections that nobody named stay unset."""
    data = recipe.model_dump(mode="json")
    named = set(recipe.model_fields_set)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise CfkvError(f"--set {setting!r} has no '='; write --set section.key=value")
        target: Any = data
        *parents, last = key.split(".")
        named.add(key.partition(".")[0])
        for part in parents:
            target = _descend(target, part, key)
        for entry in target if isinstance(target, list) else [target]:
            if not isinstance(entry, dict):
                raise _no_section(key, entry)
            entry[last] = _yaml_value(setting, text)
    return parse_recipe({name: value for name, value in data.items() if name in named}, "--set")


def _yaml_value(setting: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CfkvError(
            f"--set {setting}: {text!r} is not valid YAML; quote it if it is plain text"
        ) from error


def _no_section(key: str, value: Any) -> CfkvError:
    return CfkvError(f"--set {key}: goes below {value!r}, which has no keys; write --set section.key=value")


def _descend(target: Any, part: str, key: str) -> Any:
    if isinstance(target, list):
        if part.isdigit() and int(part) < len(target):
            return target[int(part)]
        raise CfkvError(f"--set {key}: {part!r} is not an index below {len(target)}")
    if not isinstance(target, dict):
        raise _no_section(key, target)
    if part not in target:
        raise unknown_name("key", part, target)
    return target[part]
