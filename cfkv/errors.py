"""Errors that a user can cause or meet; the command line prints them without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CfkvError(Exception):
    """A mistake in configuration or input: says what was wrong, the value seen, what is legal, what to do."""


class ItemError(CfkvError):
    """One item cannot be processed; the stage writes a failure row with `reason` and goes on."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


def unknown_name(kind: str, name: str, legal: Iterable[str]) -> CfkvError:
    """The error for a name that is not in `legal`, with the nearest legal names offered."""
    names = sorted(legal)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(match) for match in near)}? " if near else ""
    return CfkvError(f"unknown {kind} {name!r}: {hint}legal: {', '.join(names)}")
