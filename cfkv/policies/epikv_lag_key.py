"""EpiKV's causal Lag-key (methods 3.4); not LagKV, whose reference is the chunk that follows."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._base import parameters, policy_kinds
from cfkv.policies._born import EPIKV
from cfkv.policies._lag_chunks import LagChunkPolicy


@policy_kinds.register
@parameters
class EpikvLagKey(LagChunkPolicy):
    """Keep generated tokens whose keys vary most on the scale of the 128 cached tokens before; one mask."""

    vectors: ClassVar[tuple[str, ...]] = ("keys",)
    needs: ClassVar[tuple[str, ...]] = vectors
    source: ClassVar[str] = f"{EPIKV}, Lag-key"
    equation: ClassVar[str] = (
        "s(j) = mean over KV heads of std_d of the layer-mean key on the previous chunk's range"
    )
