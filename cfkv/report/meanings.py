"""What each kind of label says, for a reader who has only the report."""

from __future__ import annotations

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
    "It is a number per token and sets no threshold here, so that no signal is held against it.",
    "null": "Null: the shapes of occlusion with nothing replaced. What it shows is rounding: the floor under which "
    "no other label means anything.",
}
