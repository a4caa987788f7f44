"""Attention of the last query (TOVA, arXiv:2401.06104; methods 1.6)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import MaskScope, Policy, View, parameters, policy_kinds
from cfkv.policies._common import window_attention


@policy_kinds.register
@parameters
class Tova(Policy):
    """Evict the token that the last query attends to least, per layer; nothing is protected."""

    needs: ClassVar[tuple[str, ...]] = ("attention",)
    mask_scope: ClassVar[MaskScope] = "layer"
    source: ClassVar[str] = "TOVA (arXiv:2401.06104)"
    equation: ClassVar[str] = "s(j) = mean over query heads of a(t, j)"

    def score(self, view: View) -> Tensor:
        """One row, mean over heads."""
        return window_attention(view, "layer")
