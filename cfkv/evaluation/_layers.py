"""`epikv:layers=from:RUN`: the layers that `cfkv correlate` found on other problems, and a record of which.

Early are the layers whose hidden_diff correlates most positively with the labels within traces, late those most
negatively; a policy of bands takes their significant neighbours of the same sign too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from cfkv import store
from cfkv.analysis._stage import recorded_config
from cfkv.analysis.compare import SIGNIFICANCE
from cfkv.config import CorrelateConfig, OnlineConfig
from cfkv.errors import CfkvError
from cfkv.evaluation._names import parse_policy, policy_text
from cfkv.policies._base import make_policy, policy_kinds
from cfkv.policies._hidden import HiddenPolicy
from cfkv.schemas import CORRELATIONS
from cfkv.stage import Run

KEY, FROM = "layers", "from:"
SIGNAL, MEASURE = "hidden_diff", "spearman_within"
# Of each smoothing, the policy's parameter and the field of CorrelateConfig that must agree.
PACE = {
    "rolling_z": ("rolling", "rolling_window"),
    "rolling_mean": ("rolling", "rolling_window"),
    "ema": ("newest", "ema_alpha"),
}


@dataclass(frozen=True)
class LayerCorrelation:
    """One layer's row of the correlations; p is None where there is no test."""

    layer: int
    estimate: float
    pvalue: float | None
    adjusted_pvalue: float | None

    @property
    def significant(self) -> bool:
        """After adjustment over all tests of the label kind and measure."""
        return self.adjusted_pvalue is not None and self.adjusted_pvalue < SIGNIFICANCE

    def __str__(self) -> str:
        p = "no p" if self.adjusted_pvalue is None else f"adjusted p {self.adjusted_pvalue:.2g}"
        return (
            f"{self.layer} (rho {self.estimate:+.2f}, {p}{'' if self.significant else ', not significant'})"
        )


@dataclass(frozen=True)
class LayerChoice:
    """Layers of one policy, and where they come from. `asked` is what the user wrote, `text` the policy with layers."""

    asked: str
    text: str
    run: str
    fingerprint: str
    label: str
    smoothing: str
    early: tuple[LayerCorrelation, ...]
    late: tuple[LayerCorrelation, ...]

    def record(self) -> dict[str, Any]:
        """What the manifest says."""
        sides = {side: [asdict(each) for each in getattr(self, side)] for side in ("early", "late")}
        significant = {side: all(e.significant for e in getattr(self, side)) for side in ("early", "late")}
        names = ("run", "fingerprint", "label", "smoothing")
        head = {name: getattr(self, name) for name in names}
        return {**head, "signal": SIGNAL, "measure": MEASURE, **sides, "significant": significant}

    def note(self) -> str:
        """The same for a person, one line."""
        early, late = (", ".join(map(str, side)) for side in (self.early, self.late))
        return (
            f"{self.text}: early {early}; late {late}; {self.label} labels of {self.run} ({self.fingerprint})"
        )


def with_layers(texts: Sequence[str], label: str) -> tuple[str, ...]:
    """The policies with `layers=from:RUN` replaced by the layers; other texts as they are.

    Raises
    ------
    CfkvError
        If RUN has no such correlations, or no layer of one sign.
    """
    return tuple(choice.text if (choice := _choice(text, label)) else text for text in texts)


def layer_choices(config: OnlineConfig) -> dict[str, LayerChoice]:
    """What `layers=from:RUN` stands for in a configuration, by the text of the policy that is run."""
    choices = (_choice(text, config.label) for text in config.policies)
    return {choice.text: choice for choice in choices if choice}


def record_layers(run: Run, stage: str, choice: LayerChoice | None) -> None:
    """Note in the manifest where an arm's layers come from, also of an arm that was there already."""
    if choice is not None and (run.manifest.stage(stage) or {}).get("layers_from") != choice.record():
        run.manifest.update_stage(stage, layers_from=choice.record())


def layer_notes(choices: Mapping[str, LayerChoice]) -> str:
    """Lines for the end of a stage's message."""
    return "".join(f"\n  {choice.note()}" for choice in choices.values())


def _choice(text: str, label: str) -> LayerChoice | None:
    name, options = parse_policy(text)
    if KEY not in options or not issubclass(policy_kinds.get(name), HiddenPolicy):
        return None
    asked = options.pop(KEY)
    if not isinstance(asked, str) or not asked.removeprefix(FROM).strip() or not asked.startswith(FROM):
        raise CfkvError(
            f"policy {text!r}: {KEY} = {asked!r} is not {FROM}RUN; write {name}:{KEY}={FROM}RUN with a run directory "
            f"that has correlations, or {name}:early=[2];late=[3]"
        )
    if given := sorted({"early", "late"} & options.keys()):
        raise CfkvError(f"policy {text!r}: {KEY} sets early and late; leave out {' and '.join(given)}")
    policy = make_policy(name, options)
    if not isinstance(policy, HiddenPolicy):
        raise TypeError(f"{name} made {type(policy)}")
    place = asked.removeprefix(FROM).strip()
    run = Run(Path(place).expanduser())
    if not run.path.is_dir():
        raise CfkvError(f"policy {text!r}: {place} is no run directory; name one that has correlations")
    run.wait_for("correlate", patient=False)
    _check_pace(text, policy, run, place)
    table = store.collect(run.path, CORRELATIONS)
    early, late = chosen(table, policy, label, place)
    layers = {"early": [each.layer for each in early], "late": [each.layer for each in late]}
    return LayerChoice(
        asked=text,
        text=policy_text(make_policy(name, {**options, **layers})),
        run=place,
        fingerprint=run.require("correlate")["fingerprint"],
        label=label,
        smoothing=policy.smoothing,
        early=early,
        late=late,
    )


def _check_pace(text: str, policy: HiddenPolicy, run: Run, place: str) -> None:
    """Raise CfkvError if the correlations were smoothed faster or slower than the policy smooths."""
    if policy.smoothing not in PACE:
        return
    parameter, setting = PACE[policy.smoothing]
    own, made = getattr(policy, parameter), getattr(recorded_config(run) or CorrelateConfig(), setting)
    if own != made:
        raise CfkvError(
            f"policy {text!r} smooths with {parameter} {own}, the correlations of {place} were made with {setting} "
            f"{made}; run `cfkv correlate {place} --{setting.replace('_', '-')} {own} --overwrite`, or set "
            f"{parameter}={made}"
        )


def chosen(
    correlations: pl.DataFrame, policy: HiddenPolicy, label: str, place: str
) -> tuple[tuple[LayerCorrelation, ...], tuple[LayerCorrelation, ...]]:
    """The early and the late layers of a policy from a table of correlations, each in the order of the layers.

    The embedding's output, layer -1 of the signal, is no layer of a policy.

    Raises
    ------
    CfkvError
        If the table has no such rows, or no layer of one sign; `place` names the run.
    """
    rows = correlations.filter(
        (pl.col("signal") == SIGNAL) & (pl.col("measure") == MEASURE) & (pl.col("control") == "none")
    )
    for column, wanted, command in (
        ("kind", label, f"cfkv label {place} --kind {label}"),
        ("smoothing", policy.smoothing, f"cfkv correlate {place} --smoothings {policy.smoothing}"),
    ):
        there = rows[column].unique().sort().to_list()
        rows = rows.filter(pl.col(column) == wanted)
        if not rows.height:
            found = f"{column} {', '.join(there)}" if there else "none at all"
            hint = f"`{command}`" if there else f"`cfkv probe {place} --groups hidden`"
            then = "then correlate" if column == "kind" or not there else "with --overwrite"
            also = " (or name one that is there with --label)" if column == "kind" and there else ""
            raise CfkvError(
                f"{place} has no correlations of {SIGNAL} with {column} {wanted!r}, but {found}; run {hint}, "
                f"{then}{also}"
            )
    layers = [
        LayerCorrelation(
            row["layer"], row["estimate"], *map(_or_none, (row["pvalue"], row["adjusted_pvalue"]))
        )
        for row in rows.sort("layer").iter_rows(named=True)
        if row["layer"] is not None and row["layer"] >= 0 and not math.isnan(row["estimate"])
    ]
    if not layers:
        reasons = sorted({reason for reason in rows["nan_reason"] if reason})
        raise CfkvError(
            f"no layer of {place} has a correlation of {SIGNAL} with {label} ({', '.join(reasons) or 'no layers'}); "
            "label more traces"
        )
    return _side(layers, policy, +1, label, place), _side(layers, policy, -1, label, place)


def _or_none(value: float) -> float | None:
    return None if value is None or math.isnan(value) else value


def _side(
    layers: Sequence[LayerCorrelation], policy: HiddenPolicy, sign: int, label: str, place: str
) -> tuple[LayerCorrelation, ...]:
    """The layers with the largest correlation of a sign, ties together; of a band with its significant neighbours."""
    values = [sign * each.estimate for each in layers]
    best = max(values)
    if best <= 0:
        word, side = ("positive", "early") if sign > 0 else ("negative", "late")
        raise CfkvError(
            f"no layer of {place} has a {word} correlation of {SIGNAL} ({policy.smoothing}) with {label}, so that "
            f"{policy.name} has no {side} layer; name layers with {policy.name}:early=[..];late=[..]"
        )
    if not policy.banded:
        return tuple(each for each, value in zip(layers, values, strict=True) if value == best)
    first = last = values.index(best)
    if layers[first].significant:
        while first and _joins(layers, values, first, first - 1):
            first -= 1
        while last + 1 < len(layers) and _joins(layers, values, last, last + 1):
            last += 1
    return tuple(layers[first : last + 1])


def _joins(layers: Sequence[LayerCorrelation], values: Sequence[float], edge: int, other: int) -> bool:
    next_to = abs(layers[other].layer - layers[edge].layer) == 1
    return next_to and values[other] > 0 and layers[other].significant
