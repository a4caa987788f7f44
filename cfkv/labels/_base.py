"""The contract of a label kind, and what a labelled trace looks like to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cfkv.answers import Matcher
from cfkv.config import Execution, LabelConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.labels._scope import Scope
from cfkv.models.loading import LoadedModel
from cfkv.models.selfcheck import limits
from cfkv.registry import Registry
from cfkv.schemas import WINDOWS, Table

MASKING_KERNELS = ("sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class LabelTrace:
    """The part of a traces row that a counterfactual needs.

    `context` is token_ids[:answer_start], what an answer is regenerated from; `answer_ids` is the trace's own
    answer up to its closing token.
    """

    trace_id: str
    problem_id: str
    token_ids: tuple[int, ...]
    reasoning_start: int
    reasoning_stop: int
    answer_start: int
    answer_stop: int
    answer_prefix: str
    answer: str

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> LabelTrace:
        """Pick the fields out of a traces row.

        Raises
        ------
        ItemError
            If the answer span is empty, so that there is nothing whose probability could change.
        """
        fields = {name: row[name] for name in cls.__dataclass_fields__}
        trace = cls(**{**fields, "token_ids": tuple(row["token_ids"])})
        if trace.answer_stop <= trace.answer_start:
            raise ItemError("no_answer", "the trace has no tokens after its boundary")
        return trace

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens that precede the answer."""
        return self.token_ids[: self.answer_start]

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The trace's own answer."""
        return self.token_ids[self.answer_start : self.answer_stop]

    @property
    def reasoning_length(self) -> int:
        """Tokens between the start of the reasoning and the boundary."""
        return self.reasoning_stop - self.reasoning_start


@dataclass(frozen=True)
class TraceLength:
    """Lengths of a trace, known or bounded from above, for planning: indices into its token ids."""

    total: int
    reasoning_start: int
    reasoning_stop: int
    answer_start: int
    decoded: int  # tokens that the model has to write


@dataclass(frozen=True)
class LabelCost:
    """What labelling one trace takes at most: interventions, forwards and forwarded tokens."""

    items: int
    forwards: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class LabelledTrace:
    """Rows of the kind's own table (one per intervention) and the row of the token_labels table."""

    rows: Sequence[Mapping[str, Any]] = field(default_factory=list)
    tokens: Mapping[str, Any]


class Label(ABC):
    """One kind of counterfactual: built for a model and a configuration, applied to traces one by one.

    Class attributes: `source` (paper and section), `unit` of the value column, `sign` (what a positive value
    means), `table` (where its interventions are written), `options` (the fields of LabelConfig that it reads:
    no other one may be set, and no other one is in its fingerprint). `version` is raised when the same
    configuration gives other labels.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    unit: ClassVar[str]
    sign: ClassVar[str]
    options: ClassVar[frozenset[str]]
    table: ClassVar[Table] = WINDOWS
    version: ClassVar[int] = 1

    def __init__(
        self, loaded: LoadedModel, config: LabelConfig, execution: Execution, matcher: Matcher
    ) -> None:
        reasons = limits(loaded)
        if reasons:
            raise CfkvError(f"label kind {self.name} cannot use {loaded.name}: {'; '.join(reasons)}")
        if loaded.attn_implementation not in MASKING_KERNELS:
            raise CfkvError(
                f"--attn-implementation {loaded.attn_implementation} cannot hide single entries, which labels need; "
                f"use {' or '.join(MASKING_KERNELS)}"
            )
        self.loaded, self.config, self.execution, self.matcher = loaded, config, execution, matcher
        self.scope = Scope.parse(config.layers, config.kv_heads, loaded.shape)

    @classmethod
    def settings(cls, config: LabelConfig) -> dict[str, Any]:
        """What of the configuration can change a label of this kind, for its fingerprint.

        Raises
        ------
        CfkvError
            If a field is set that this kind does not read.
        """
        for name in LabelConfig.model_fields:
            value = getattr(config, name)
            if name != "kind" and name not in cls.options and value != LabelConfig.model_fields[name].default:
                flag = f"--{name.replace('_', '-')}"
                raise CfkvError(
                    f"{flag} {value}: label kind {cls.name} has no use for it; it reads "
                    f"{', '.join(sorted(cls.options))}"
                )
        return config.model_dump(mode="json", include={"kind", *cls.options})

    @abstractmethod
    def label(self, trace: LabelTrace) -> LabelledTrace:
        """Intervene on every window of `trace`.

        Raises
        ------
        ItemError
            If this trace cannot be labelled; the stage writes the reason.
        """

    @classmethod
    @abstractmethod
    def cost(cls, config: LabelConfig, execution: Execution, length: TraceLength) -> LabelCost:
        """What a trace of this length will take, without the decoding of windows whose draft fails."""


label_kinds: Registry[Label] = Registry("label", "cfkv.labels")
