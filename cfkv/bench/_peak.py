"""Peak memory of tensors while something runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class _Ledger(TorchDispatchMode):
    """Adds up the storages that operators return, and takes them off when they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        before = {
            tensor.untyped_storage()._cdata
            for tensor in tree_iter((arguments, keywords))
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor.untyped_storage(), before)
        return result

    def _enter(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = storage._cdata
        if key in self._known or key in before:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors alive at once during `call`, beyond those alive before it.

    On a GPU its allocator is asked. On a CPU the results of all operators are counted, which leaves out what a
    kernel allocates and frees inside itself.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        _reset(device)
        start = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - start
    with _Ledger() as ledger:
        call()
    return ledger.peak


# The highest peak of a device before `peak_bytes` last reset its allocator's record.
_before: dict[str, int] = {}


def watch_from_here(device: torch.device) -> None:
    """Forget all earlier peaks of a GPU."""
    if device.type == "cuda":
        _reset(device)
        _before[str(device)] = 0


def highest_bytes(device: torch.device) -> int | None:
    """The most bytes that a GPU's allocator held since `watch_from_here`, those before it included; None on a CPU."""
    if device.type != "cuda":
        return None
    return max(_before.get(str(device), 0), torch.cuda.max_memory_allocated(device))


def _reset(device: torch.device) -> None:
    """Reset the allocator's record, and keep what it was."""
    _before[str(device)] = highest_bytes(device) or 0
    torch.cuda.reset_peak_memory_stats(device)
