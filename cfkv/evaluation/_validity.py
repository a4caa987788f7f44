"""Scores of policies on a labelled trace, from one reading of it or from stored signals, and what they are worth.

A policy is shown the full cache as it stood at a checkpoint, with nothing protected: labels can only judge whom a
score prefers. The measures are analysis/validity.py's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfkv.analysis.validity import judge
from cfkv.config import OfflineConfig, percent
from cfkv.errors import CfkvError, ItemError
from cfkv.evaluation._labels import LabelledTrace, TraceLabels
from cfkv.evaluation._reading import Reading, label_columns, only
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.selfcheck import limits, number_ranges
from cfkv.policies._base import SEEN_COLUMNS, VIEW_COLUMNS, Policy, Seen, State, View, check_scores
from cfkv.policies._variance import VariancePolicy

LABEL_COLUMNS = frozenset({"label", "shuffled_label"})
ATTENTION = frozenset({"attention"})
# Observed columns that are signals of the same name, and the group that stores them.
SIGNAL_GROUPS: Mapping[str, str] = {
    "hidden_diff": "hidden",
    "key_variance": "kv",
    "value_variance": "kv",
    "key_norm": "kv",
}


@dataclass(frozen=True)
class Judged:
    """What became of one policy on one trace: rows of policy_validity, and its status."""

    rows: list[dict[str, Any]]
    status: str = "ok"
    reason: str | None = None


class Source(Protocol):
    """Where scores come from: `view(text, step, labels)` at steps that only grow."""

    def view(self, text: str, step: int, labels: Tensor) -> View:
        """What a policy is shown with `step` tokens cached."""


class FromModel:
    """One forward pass over a trace, which all policies watch."""

    def __init__(
        self,
        loaded: LoadedModel,
        policies: Mapping[str, Policy],
        trace: LabelledTrace,
        stop: int,
        **options: int,
    ) -> None:
        self.index = {text: index for index, text in enumerate(policies)}
        self.reading = Reading(
            loaded,
            list(policies.values()),
            trace.token_ids[:stop],
            prompt_len=trace.prompt_len,
            **options,
        )

    def view(self, text: str, step: int, labels: Tensor) -> View:
        """Read on to `step` and look."""
        if self.reading.length < step:
            self.reading.read_to(step)
        shown = self.reading.view(self.index[text], step, labels)
        return replace(shown, protected=torch.zeros_like(shown.protected))


class FromSignals:
    """Stored signals, for policies whose scores never change after a token's birth.

    columns : by name, [L, N] or [L, G or 1, N]. sizes : layers and KV heads of the model.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        trace: LabelledTrace,
        columns: Mapping[str, Tensor],
        sizes: tuple[int, int],
        seed: int,
    ) -> None:
        self.policies, self.trace, self.columns, self.sizes, self.seed = policies, trace, columns, sizes, seed
        self.states: dict[str, State] = {}

    def view(self, text: str, step: int, labels: Tensor) -> View:
        """The policy's table with the tokens before `step`."""
        policy, total = self.policies[text], len(self.trace.token_ids)
        rows = policy.rows(*self.sizes)
        tokens = torch.arange(total)
        positions = tokens.expand(*rows, -1)
        if text not in self.states:
            state = policy.init(rows, total)
            if policy.observes:
                policy.observe(
                    state,
                    Seen(
                        tokens=tokens,
                        slots=positions,
                        positions=positions,
                        valid=torch.ones(positions.shape, dtype=torch.bool),
                        prompt_len=self.trace.prompt_len,
                        columns=only(self.columns, policy.observes),
                        seed=self.seed,
                    ),
                )
            self.states[text] = state
        valid = positions < step
        return View(
            step=step,
            prompt_len=self.trace.prompt_len,
            positions=positions,
            valid=valid,
            protected=torch.zeros_like(valid),
            columns=only(label_columns(labels, positions, self.seed), policy.needs),
            state=self.states[text].columns,
            seed=self.seed,
        )


def judge_trace(
    source: Callable[[], Source],
    policies: Mapping[str, Policy],
    trace: LabelledTrace,
    config: OfflineConfig,
) -> dict[str, Judged]:
    """Judge all policies on one trace, at every checkpoint and for every kind."""
    found: dict[str, Judged] = {text: Judged([]) for text in policies}
    try:
        opened = source()
        for checkpoint, step in sorted(
            ((name, trace.step(name)) for name in config.checkpoints), key=lambda pair: pair[1]
        ):
            for text, policy in policies.items():
                if found[text].status != "ok":
                    continue
                try:
                    found[text].rows.extend(_rows(opened, text, policy, trace, checkpoint, step, config))
                except torch.OutOfMemoryError as error:
                    found[text] = _failed(error)
    except ItemError as error:
        return {text: Judged([], error.status, error.reason) for text in policies}
    except torch.OutOfMemoryError as error:
        return dict.fromkeys(policies, _failed(error))
    return found


def _failed(error: torch.OutOfMemoryError) -> Judged:
    return Judged([], "out_of_memory", f"{str(error).splitlines()[0]}; lower --chunk-size")


def _rows(
    source: Source,
    text: str,
    policy: Policy,
    trace: LabelledTrace,
    checkpoint: str,
    step: int,
    config: OfflineConfig,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    scores: NDArray[np.float32] | None = None
    shares = [percent(budget) for budget in config.budgets]
    for labels in trace.labels:
        if scores is None or LABEL_COLUMNS & set(policy.needs):
            scores = _scores(source, text, policy, labels, step)
        candidates = labels.candidates(step)
        truth = labels.truth(candidates)
        common = {
            "policy": text,
            "kind": labels.kind,
            "trace_id": trace.trace_id,
            "problem_id": trace.problem_id,
            "checkpoint": checkpoint,
            "step": step,
            "n_candidates": candidates.size,
            "n_important": int(truth.important.sum()),
        }
        rows += [
            {
                **common,
                "measure": each.measure,
                "share": each.share,
                "value": each.value,
                "nan_reason": each.reason,
            }
            for each in judge(scores[:, candidates], truth, shares)
        ]
    return rows


@torch.inference_mode()
def _scores(source: Source, text: str, policy: Policy, labels: TraceLabels, step: int) -> NDArray[np.float32]:
    """[tables, tokens] by position: slot i of both sources holds token i."""
    view = source.view(text, step, labels.column())
    scores = policy.score(view)
    check_scores(policy, view, scores)
    found: NDArray[np.float32] = scores.flatten(0, -2)[:, :step].float().cpu().numpy()
    return found


def trace_seed(seed: int, trace_id: str) -> int:
    """The seed of what is drawn on one trace."""
    digest = hashlib.blake2b(f"{seed}/{trace_id}/offline".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def signal_groups(policy: Policy, *, per_head: bool) -> frozenset[str] | None:
    """Groups of stored signals that a policy can be judged from, or None if it needs the model.

    `per_head` : whether the run keeps the KV heads of signals. Their mean alone is enough for policies that take the
    mean; a score per head, or one of another package, needs the heads.
    """
    if (
        not policy.frozen
        or not set(policy.needs) <= LABEL_COLUMNS
        or not set(policy.observes) <= {*SIGNAL_GROUPS}
    ):
        return None
    if not policy.observes and policy.mask_scope != "global":
        return None
    by_head = set(policy.observes) - {"hidden_diff"}
    if by_head and not per_head and not isinstance(policy, VariancePolicy):
        return None
    return frozenset(SIGNAL_GROUPS[name] for name in policy.observes)


def refused_columns(loaded: LoadedModel) -> tuple[frozenset[str], str]:
    """Columns that the model cannot give, and why."""
    everything = frozenset({*VIEW_COLUMNS, *SEEN_COLUMNS}) - LABEL_COLUMNS
    if reasons := limits(loaded):
        return everything, reasons[0]
    devices = {parameter.device for parameter in loaded.model.parameters()}
    if len(devices) > 1:
        return everything, f"it is spread over {len(devices)} devices; leave out --device-map"
    if extras := compat.attention_extras(loaded.model):
        what = ", ".join(sorted(set(extras.values())))
        return ATTENTION, f"attention of layers {number_ranges(sorted(extras))} has {what}"
    return frozenset(), ""


def check_columns(loaded: LoadedModel, policies: Mapping[str, Policy], asked: Sequence[str]) -> list[str]:
    """Policies of `policies` that the model cannot be asked for; returned if only `all` named them.

    Raises
    ------
    CfkvError
        If a policy that was asked for by name is among them, or one declares a column that does not exist.
    """
    for text, policy in policies.items():
        for kind, names, legal in (
            ("needs", policy.needs, VIEW_COLUMNS),
            ("observes", policy.observes, SEEN_COLUMNS),
        ):
            if unknown := sorted(set(names) - set(legal)):
                raise CfkvError(
                    f"policy {text} {kind} the column {unknown[0]!r}, which nothing gives; legal: {', '.join(legal)}"
                )
    refused, reason = refused_columns(loaded)
    lacking = {t: sorted({*p.needs, *p.observes} & refused) for t, p in policies.items()}
    lacking = {text: columns for text, columns in lacking.items() if columns}
    if named := [text for text in lacking if "all" not in asked or text in asked]:
        columns = sorted({column for text in named for column in lacking[text]})
        raise CfkvError(
            f"{loaded.name}: {reason}, so that {', '.join(named)} cannot be judged ({', '.join(columns)} would be "
            f"needed); leave them out of --policies"
        )
    return sorted(lacking)
