"""EpiKV's KV-val policy (methods 3.3)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._base import parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._variance import VariancePolicy


@policy_kinds.register
@parameters
class KvVal(VariancePolicy):
    """Keep generated tokens around which values vary most over the head dimension; frozen at birth."""

    observes: ClassVar[tuple[str, ...]] = ("value_variance",)
    column: ClassVar[str] = "value_variance"
    source: ClassVar[str] = f"{EPIKV}, KV-val"
    equation: ClassVar[str] = "s(t) = mean64 of the mean over layers and KV heads of Var_d(v_t)"
