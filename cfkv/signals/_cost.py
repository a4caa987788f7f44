"""What probing costs over the bare forward, measured side by side in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.signals._base import Signal, signal_kinds
from cfkv.signals._last_rows import agreement_profile
from cfkv.signals._probe import probe

Clock = Callable[[], float]


@dataclass(frozen=True)
class Cost:
    """Seconds (the best of the repeats) and peak bytes (None where the system does not say) of one task.

    On a CPU the C library keeps freed memory, in holes that differ from run to run: MALLOC_MMAP_THRESHOLD_=65536 in
    the environment of a process of its own shows what is live.
    """

    name: str
    seconds: float
    peak_bytes: int | None


def random_ids(loaded: LoadedModel, tokens: int, seed: int = 0) -> list[int]:
    """Token ids drawn from the whole vocabulary: the cost does not depend on them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, loaded.shape.vocabulary, (tokens,), generator=generator).tolist()


@torch.inference_mode()
def bare_forward(loaded: LoadedModel, ids: Sequence[int], chunk_size: int, *, all_logits: bool = True) -> Any:
    """The chunked forward that a probe makes, and nothing else; returns its cache."""
    cache, tokens = compat.new_cache(), torch.tensor([list(ids)], device=loaded.device)
    for start in range(0, len(ids), chunk_size):
        piece = tokens[:, start : start + chunk_size]
        compat.forward(loaded.model, piece, cache, logits_to_keep=0 if all_logits else 1)
    return cache


def probe_costs(
    loaded: LoadedModel,
    groups: Sequence[Sequence[str]],
    *,
    tokens: int = 2048,
    chunk_size: int = 512,
    repeats: int = 3,
    clock: Clock = time.perf_counter,
) -> list[Cost]:
    """The bare forward with all logits, then one probe for each list of groups; repeats take turns."""
    ids = random_ids(loaded, tokens)
    members = {"+".join(names): [s() for s in signal_kinds.members() if s.group in names] for names in groups}
    tasks: dict[str, Callable[[], Any]] = {"bare": lambda: bare_forward(loaded, ids, chunk_size)}
    for name, signals in members.items():
        tasks[name] = _probing(loaded, ids, signals, chunk_size)
    return _take_turns(tasks, repeats, clock)


def _probing(
    loaded: LoadedModel, ids: Sequence[int], signals: Sequence[Signal], chunk_size: int
) -> Callable[[], Any]:
    return lambda: probe(loaded, ids, signals, chunk_size=chunk_size)


def agreement_costs(
    loaded: LoadedModel,
    *,
    tokens: int = 2048,
    chunk_size: int = 512,
    repeats: int = 3,
    clock: Clock = time.perf_counter,
) -> list[Cost]:
    """A prefill, the same one observed, and the second pass over a prefill's cache."""
    ids = random_ids(loaded, tokens)
    cache = bare_forward(loaded, ids, chunk_size, all_logits=False)
    tasks = {
        "prefill": lambda: bare_forward(loaded, ids, chunk_size, all_logits=False),
        "one pass": lambda: agreement_profile(loaded, ids, chunk_size=chunk_size),
        "second pass": lambda: agreement_profile(loaded, ids, chunk_size=chunk_size, cache=cache),
    }
    return _take_turns(tasks, repeats, clock)


def _take_turns(tasks: dict[str, Callable[[], Any]], repeats: int, clock: Clock) -> list[Cost]:
    best = dict.fromkeys(tasks, float("inf"))
    peaks: dict[str, int | None] = {}
    for _ in range(repeats):
        for name, task in tasks.items():
            _reset_peak()
            began = clock()
            task()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[name] = min(best[name], clock() - began)
            peaks.setdefault(name, _peak_bytes())  # of the first turn: later ones find freed memory in place
    return [Cost(name, best[name], peaks[name]) for name in tasks]


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    switch = Path("/proc/self/clear_refs")
    if switch.exists():
        switch.write_text("5")


def _peak_bytes() -> int | None:
    """Of the GPU's allocator, else of the process (Linux), model included."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
