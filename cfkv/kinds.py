"""What is declared of a label kind for those who must not import torch: the truth it looks for, and its unit.

A kind that is not named here (another package's) is held against the wider truth, and its value is in nats/token,
as those of all window kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Truth = Literal["occlusion", "cache"]


@dataclass(frozen=True)
class KindFacts:
    """`truth`: the planted tokens that the intervention can find (fields of `problems.registers.PlantedTruth`).

    Replacing tokens, or cutting the text, hides whatever the model still had to read: `occlusion`. Removing cached
    entries after they were used once hides only what is read again: `cache`. `unit` is that of the value column.
    `graded` kinds store a value and leave the verdict to the analysis.
    """

    truth: Truth = "occlusion"
    unit: str = "nats/token"
    graded: bool = False


KINDS: Mapping[str, KindFacts] = {
    "occlusion": KindFacts(truth="occlusion"),
    "truncation": KindFacts(truth="occlusion"),
    "null": KindFacts(truth="occlusion"),
    "knockout": KindFacts(truth="cache"),
    "eviction_kl": KindFacts(truth="cache", unit="nats", graded=True),
}


def kind_facts(kind: str) -> KindFacts:
    """The facts of a kind, or the defaults of one that is not known here."""
    return KINDS.get(kind, KindFacts())
