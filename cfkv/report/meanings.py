"""What each kind of label says, for a reader who has only the report."""

from __future__ import annotations

from dataclasses import dataclass

from cfkv.kinds import kind_facts

_ENDS = (
    "The window flips if the answer then differs from the trace's own, or none is given; a token is important if any "
    "window over it flips. Δnll says how much less likely the original answer becomes, in nats per token."
)

MEANINGS = {
    "occlusion": "Occlusion: the tokens of one window are replaced by a token that says nothing, and the model writes "
    f"its answer again. {_ENDS}",
    "knockout": "Knockout: the cached entries of one window are hidden from the end of the reasoning on, as an evictor "
    f"would leave them, and the model writes its answer again. {_ENDS}",
    "truncation": "Truncation: the reasoning is cut before a window and closed there, and the model writes its answer "
    f"again. The label tracks position, since early cuts remove almost everything. {_ENDS}",
    "eviction_kl": "Leave-one-out eviction KL: at checkpoints of the reasoning one block of cached tokens is removed, "
    "and the divergence of the next tokens' distributions, with against without, is averaged over the horizon (nats). "
    "A token's value is the mean over the checkpoints at which a block over it was removed alone. It is a number, no "
    "verdict: the analysis calls the largest values of each trace high damage.",
    "null": "Null: the shapes of occlusion with nothing replaced. What it shows is rounding: the floor under which "
    "no other label means anything.",
}


@dataclass(frozen=True)
class Wording:
    """How the label of one kind is named: the noun of titles, its two classes, and what stands behind the shading."""

    noun: str
    positive: str
    negative: str
    because: str
    value: str
    untested: str
    unit: str
    by_share: bool  # the number of positive tokens is set, not found

    @property
    def subject(self) -> str:
        """What a figure holds signals against."""
        return self.noun if self.by_share else f"token {self.noun}"


def wording(kind: str, *, graded: bool, share: float = 0.1) -> Wording:
    """The words for a kind; `graded` ones have high damage, the `share` of a trace with the largest value."""
    unit = kind_facts(kind).unit
    if graded:
        return Wording(
            noun="high damage",
            positive="high damage",
            negative="other tested token",
            because=f"its value is among the largest {100 * share:g} % of its trace",
            value="the mean KL of its removals over the checkpoints",
            untested="answer, or never removed",
            unit=unit,
            by_share=True,
        )
    return Wording(
        noun="importance",
        positive="important",
        negative="not important",
        because="a window over it changed the answer",
        value="the mean Δnll of the covering windows",
        untested="answer",
        unit=unit,
        by_share=False,
    )
