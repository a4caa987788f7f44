"""Writing behind the work: one thread, one pending task, errors raised where the next one is handed over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any


class Writer:
    """Runs submitted calls in order, each while the caller goes on (`behind`) or at once; a context manager.

    At most one call is pending, so that no more than one part waits in memory. Leaving the block waits for it,
    also after an exception: what was finished is written.
    """

    def __init__(self, *, behind: bool = True) -> None:
        self.behind = behind
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cfkv-writer")
        self._pending: Future[Any] | None = None

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Wait for the call before, raise what it raised, and start this one."""
        if not self.behind:
            call(*arguments)
            return
        self._settle()
        self._pending = self._pool.submit(call, *arguments)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if error is None:
            self._settle()
