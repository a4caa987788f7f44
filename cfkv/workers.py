"""Which share of a stage this process does.

accelerate (torchrun underneath) or a Slurm array decide how many processes there are; no collective carries
data, so a process only needs its own index. Which parts are its own follows from their numbers alone: a stage
never knows the lengths of traces that are not written yet, and part k is the same process's in every stage.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass

from cfkv.config import Execution
from cfkv.errors import CfkvError

SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")


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
        return owner(part, self.count) == self.index

    def shard_owns(self, part: int) -> bool:
        """Whether `part` is for a process of this shard to do."""
        return owner(part, self.count) // self.world_size == self.shard


def owner(part: int, count: int) -> int:
    """Which of `count` processes does `part`.

    A round deals one part to each. Round robin would give the last process the longest trace of every round where
    lengths rise, and always the same process the long ones where they have a period. So each round is followed by
    its mirror image, which cancels a steady rise or fall; and every two rounds the seats move on, in a shuffled
    order, such that over `count` pairs each process had each seat twice: a period of `count` parts cancels too,
    and no other one has a pattern to lock onto. The shuffles are hashes of their numbers, the same everywhere.
    """
    turn, seat = divmod(part, count)
    pair, mirrored = divmod(turn, 2)
    cycle, step = divmod(pair, count)
    if mirrored:
        seat = count - 1 - seat
    return _shuffled(count, f"process/{cycle}")[(seat + _shuffled(count, f"shift/{cycle}")[step]) % count]


@functools.cache
def _shuffled(count: int, salt: str) -> tuple[int, ...]:
    """0 to `count` - 1 in an order that only depends on the arguments."""

    def key(number: int) -> bytes:
        return hashlib.blake2b(f"{salt}/{number}".encode(), digest_size=8).digest()

    return tuple(sorted(range(count), key=key))


def workers(shard: str = "0/1") -> Workers:
    """Read the process's place from the launcher's environment and `--shard i/n`."""
    index, _, count = shard.partition("/")
    if not (shard.isascii() and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise CfkvError(
            f"--shard {shard!r} is not i/n with i below n; the shards of four jobs are 0/4 to 3/4"
        )
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return Workers(rank, world_size, int(index), int(count))


def check_placement(execution: Execution) -> None:
    """Refuse a `--device-map` that is none, or that several processes of this machine would all follow."""
    spread = execution.device_map
    if spread is None:
        return
    if spread not in SPREADS:
        raise CfkvError(
            f"--device-map {spread!r} is none of {', '.join(SPREADS)}; one device is named by --device"
        )
    if execution.device != "auto":
        raise CfkvError(
            f"--device-map {spread} spreads the model over all devices, and --device {execution.device} names "
            "one: leave one of them out"
        )
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if beside > 1:
        raise CfkvError(
            f"--device-map {spread} gives each process all GPUs of its machine, and {beside} were started on this "
            "one: start one process without the launcher, and share the work between machines by --shard i/n"
        )
