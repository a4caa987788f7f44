"""Progress for people: a bar on a terminal, plain lines elsewhere, silence on ranks above 0."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0


class Ticker:
    """Counts items done out of `total`; use as a context manager and call `advance`."""

    def __init__(self, label: str, total: int, *, quiet: bool = False) -> None:
        self.label, self.total, self.quiet = label, total, quiet
        self.done = 0
        self._printed = -1
        self._last = time.monotonic()
        self._started = self._last
        self._bar: Progress | None = None

    def __enter__(self) -> Ticker:
        if not self.quiet and sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total)
        return self

    def advance(self, count: int = 1) -> None:
        """Say that `count` more items are done."""
        self.done += count
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif not self.quiet:
            moment = time.monotonic()
            if moment - self._last >= LINE_SECONDS:
                self._last = moment
                self._line(moment)

    def _line(self, moment: float) -> None:
        if self.done == self._printed:
            return
        self._printed = self.done
        spent = moment - self._started
        print(f"{self.label}: {self.done}/{self.total} after {spent:.0f} s", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self.quiet:
            self._line(time.monotonic())
