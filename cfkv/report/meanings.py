"""What each kind of label says, for a reader who has only the report."""

from __future__ import annotations

_ENDS = (
    "The window flips if the answer then differs from the trace's own, or none is given; a token is important if any "
    "window over it flips. Δnll says how much less likely the original answer becomes, in nats per token."
)

MEANINGS = {
    "occlusion": "Occlusion: the tokens of one window are replaced by a token that says nothing, and the model writes "
    f"its answer again. {_ENDS}",
}
