"""PAGE's random control: sinks and a window instead of the prompt (methods 1.2)."""

from __future__ import annotations

from typing import ClassVar

from cfkv.policies._base import Protection, Schedule, parameters, policy_kinds
from cfkv.policies._common import PAGE
from cfkv.policies.random import Random


@policy_kinds.register
@parameters
class RandomPage(Random):
    """Keep 4 sinks, the last 32 prompt tokens and prompt tokens drawn at random; acts once."""

    source: ClassVar[str] = "PAGE, random control"

    @property
    def schedule(self) -> Schedule:
        """After the prompt."""
        return Schedule("once")

    def protection(self, slots: int, prompt_len: int, step: int) -> Protection:
        """As its other policies."""
        return PAGE
