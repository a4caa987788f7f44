"""Mathematical equality by math-verify, in a worker process that is killed when it hangs.

math-verify's own time limit uses SIGALRM, which fails off the main thread; a process can always be ended.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from multiprocessing.connection import Connection

from cfkv.answers import exact_match
from cfkv.errors import CfkvError

TIMEOUT_SECONDS = 10.0
START_SECONDS = 120.0


def _serve(pipe: Connection) -> None:
    from math_verify import parse, verify

    pipe.send(None)  # ready: importing can take longer than a comparison may
    while True:
        answer, reference = pipe.recv()
        parsed = [
            parse(f"${text}$", parsing_timeout=None, raise_on_error=False) for text in (reference, answer)
        ]
        pipe.send(bool(verify(*parsed, timeout_seconds=None, raise_on_error=False)))


class MathMatcher:
    """Compares answers as mathematics; a comparison over the time limit counts as different and is counted."""

    def __init__(self, timeout: float = TIMEOUT_SECONDS) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise CfkvError(
                "answer_match 'math' needs math-verify, which is not installed; `pip install 'cfkv[math]'`, or "
                "use --answer-match exact"
            )
        self.timeout = timeout
        self.timeouts = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def _start(self) -> Connection:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other,), daemon=True)
            self._process.start()
            other.close()
            self._await_ready(self._pipe)
        return self._pipe

    def _await_ready(self, pipe: Connection) -> None:
        try:
            if pipe.poll(START_SECONDS):
                pipe.recv()
                return
            problem = f"was not ready after {START_SECONDS:.0f} s"
        except (EOFError, ConnectionError):
            problem = "ended while starting"
        self.close()
        raise CfkvError(f"the worker of math-verify {problem}; try again, or use --answer-match exact")

    def __call__(self, answer: str | None, reference: str | None) -> bool:
        """True if both are present and mathematically equal."""
        if answer is None or reference is None:
            return False
        if exact_match(answer, reference):
            return True
        pipe = self._start()
        try:
            pipe.send((answer, reference))
            if pipe.poll(self.timeout):
                return bool(pipe.recv())
        except (EOFError, ConnectionError):  # the worker died; counted like a timeout
            pass
        self.timeouts += 1
        self.close()
        return False

    def close(self) -> None:
        """End the worker process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None
