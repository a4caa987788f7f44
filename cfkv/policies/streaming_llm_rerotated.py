"""StreamingLLM as published: kept keys are rotated to contiguous positions (methods 1.3)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._base import parameters, policy_kinds
from cfkv.policies.streaming_llm import StreamingLlm


@policy_kinds.register
@parameters
class StreamingLlmRerotated(StreamingLlm):
    """Keep the first tokens and the newest ones, moved together to positions 0, 1, ... of the cache."""

    compact: ClassVar[bool] = True
    equation: ClassVar[str] = "s(j) = j; the first 4 tokens are protected; positions are compact"
    deviations: ClassVar[str] = ""
