"""Which blocks are removed at a checkpoint: all, drawn within bands of age, listed in a file; and pairs of them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cfkv.config import LabelConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.labels._base import LabelTrace
from cfkv.labels._packed import Block

ALL, STRATIFIED = "all", "stratified"

# Blocks that are removed together: one, or a pair.
Removal = tuple[Block, ...]


@dataclass(frozen=True)
class Listed:
    """One line of a file of candidates; `step` None means every checkpoint after its blocks."""

    removal: Removal
    step: int | None


def is_file(candidates: str) -> bool:
    """Whether the option names a file."""
    return candidates not in (ALL, STRATIFIED)


def content_hash(candidates: str) -> str:
    """The option as a fingerprint sees it: a file counts by its content."""
    if not is_file(candidates):
        return candidates
    return f"listed:{hashlib.blake2b(_text(candidates).encode(), digest_size=8).hexdigest()}"


def listed(candidates: str) -> Mapping[str, Sequence[Listed]]:
    """Read a file of candidates, by trace id.

    Raises
    ------
    CfkvError
        Naming file and line, for anything that is not `{"trace_id": ..., "blocks": [[start, stop], ...]}` with
        one or two blocks that do not overlap, and an optional whole number `step`.
    """
    found: dict[str, list[Listed]] = {}
    for number, line in enumerate(_text(candidates).splitlines(), 1):
        if line.strip():
            try:
                entry = json.loads(line)
                trace_id, each = entry["trace_id"], _entry(entry)
            except (ValueError, KeyError, TypeError) as error:
                raise CfkvError(
                    f"{candidates}, line {number}: {line.strip()[:80]!r} is no candidate ({error!r}); a line is "
                    '{"trace_id": "d/1/0", "blocks": [[120, 121]], "step": 160}, with one block or two that do not '
                    "overlap; step is optional"
                ) from error
            found.setdefault(str(trace_id), []).append(each)
    return found


def _entry(entry: Mapping[str, Any]) -> Listed:
    blocks = sorted((int(start), int(stop)) for start, stop in entry["blocks"])
    if not 1 <= len(blocks) <= 2 or any(not 0 <= start < stop for start, stop in blocks):
        raise ValueError("one or two blocks with 0 <= start < stop are legal")
    if len(blocks) == 2 and blocks[0][1] > blocks[1][0]:
        raise ValueError("the blocks overlap")
    step = entry.get("step")
    return Listed(tuple(blocks), None if step is None else int(step))


def _text(candidates: str) -> str:
    path = Path(candidates).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CfkvError(
            f"--candidates {candidates!r} is neither all nor stratified, nor a JSONL file that can be read ({error})"
        ) from error


def grid(start: int, stop: int, size: int) -> list[Removal]:
    """Blocks of `size` tokens from `start` on, the last clipped at `stop`."""
    return [((first, min(first + size, stop)),) for first in range(start, stop, size)]


def removals(
    trace: LabelTrace, step: int, config: LabelConfig, given: Mapping[str, Sequence[Listed]] | None
) -> list[Removal]:
    """What is removed at one checkpoint: single blocks by position, then pairs.

    Both blocks of a pair are among the single removals, so that its synergy can be told.
    """
    generator = np.random.default_rng(_seed(config.seed, trace.trace_id, step))
    if given is not None:
        here = [each.removal for each in given.get(trace.trace_id, ()) if each.step in (None, step)]
        fitting = [removal for removal in here if removal[-1][1] <= step]
        singles: list[Removal] = sorted({(block,) for removal in fitting for block in removal})
        pairs = sorted({removal for removal in fitting if len(removal) == 2})
    else:
        singles = grid(trace.reasoning_start, step, config.block)
        if config.candidates == STRATIFIED:
            singles = _stratified(singles, step, config.age_bands, config.per_band, generator)
        pairs = []
    return [*singles, *pairs, *_drawn_pairs(singles, config.pairs, set(pairs), generator)]


def _seed(seed: int, trace_id: str, step: int) -> int:
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/{trace_id}/{step}/candidates".encode(), digest_size=8).digest()
    )


def _stratified(
    singles: Sequence[Removal], step: int, bands: int, each: int, generator: np.random.Generator
) -> list[Removal]:
    """Without replacement, `each` per band of age (step - start); bands are equally wide, and all blocks of a
    band that has no more are taken."""
    ages = np.array([step - removal[0][0] for removal in singles])
    band = (ages - 1) * bands // max(1, int(ages.max()))
    chosen: list[int] = []
    for index in range(bands):
        members = np.flatnonzero(band == index)
        chosen += generator.choice(members, min(each, len(members)), replace=False).tolist()
    return [singles[place] for place in sorted(chosen)]


def _drawn_pairs(
    singles: Sequence[Removal], count: int, known: set[Removal], generator: np.random.Generator
) -> list[Removal]:
    total = len(singles) * (len(singles) - 1) // 2
    if count == 0 or total == 0:
        return []
    if 4 * count >= total:
        every = [(*first, *second) for first, second in itertools.combinations(singles, 2)]
        order = generator.permutation(len(every))[:count]
        drawn = {every[place] for place in order}
    else:
        drawn = set()
        while len(drawn) < count:
            first, second = sorted(generator.choice(len(singles), 2, replace=False).tolist())
            drawn.add((*singles[first], *singles[second]))
    return sorted(drawn - known)


def check_listed(trace: LabelTrace, given: Mapping[str, Sequence[Listed]]) -> None:
    """Raise ItemError if a listed block lies beyond the trace."""
    total = len(trace.token_ids)
    for each in given.get(trace.trace_id, ()):
        if each.removal[-1][1] > total or (each.step is not None and not 0 < each.step < total):
            raise ItemError(
                "bad_candidate",
                f"candidate blocks {[list(block) for block in each.removal]} at step {each.step} do not fit the "
                f"trace's {total} tokens",
            )
