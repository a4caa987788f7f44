"""Which share of a stage this process does.

accelerate (torchrun underneath) or a Slurm array decide how many processes there are; no collective carries
data, so a process only needs its own index. Parts are dealt round robin: process i of n does parts i, i+n, ...
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from cfkv.errors import CfkvError


@dataclass(frozen=True)
class Workers:
    """`rank` of `world_size` processes inside shard `shard` of `shards`."""

    rank: int = 0
    world_size: int = 1
    shard: int = 0
    shards: int = 1

    @property
    def count(self) -> int:
        """All processes of all shards."""
        return self.world_size * self.shards

    @property
    def index(self) -> int:
        """This process among all of them."""
        return self.shard * self.world_size + self.rank

    @property
    def speaks(self) -> bool:
        """Only rank 0 of a shard prints."""
        return self.rank == 0

    def owns(self, part: int) -> bool:
        """Whether `part` is this process's to do."""
        return part % self.count == self.index

    def shard_owns(self, part: int) -> bool:
        """Whether `part` is for a process of this shard to do."""
        return part % self.count // self.world_size == self.shard


def workers(shard: str = "0/1") -> Workers:
    """Read the process's place from the launcher's environment and `--shard i/n`."""
    index, _, count = shard.partition("/")
    if not (shard.isascii() and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise CfkvError(
            f"--shard {shard!r} is not i/n with i below n; the shards of four jobs are 0/4 to 3/4"
        )
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return Workers(rank, world_size, int(index), int(count))
