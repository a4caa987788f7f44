"""CAOTE against the mean value (FastCAOTE; methods 1.16)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cfkv.policies._base import View, parameters, policy_kinds
from cfkv.policies._keys import mean_vector
from cfkv.policies.caote import Caote


@policy_kinds.register
@parameters
class FastCaote(Caote):
    """CAOTE with the mean value in place of the attention output, per KV head."""

    source: ClassVar[str] = "FastCAOTE, on TOVA's row"
    equation: ClassVar[str] = "s(j) = a_j / (1 - a_j) * ||mean of v_i - v_j||_2, a: the last row"

    def outputs(self, shares: Tensor, values: Tensor, view: View) -> Tensor:
        """The mean value, for every query head."""
        return mean_vector(values, view.valid).expand(-1, -1, shares.shape[2], -1)
