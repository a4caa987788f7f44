"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass, field

EXAMPLES = 3


@dataclass(frozen=True)
class Violation:
    """One row, part or file that is not as it should be."""

    where: str
    seen: str
    expected: str


@dataclass
class Check:
    """One check of one table: how much was looked at, how much was wrong, the first few of these.

    `traces` are those with a violation: a later check may leave them out, so that one fault is told once.
    """

    table: str
    name: str
    seen: int = 0
    wrong: int = 0
    examples: list[Violation] = field(default_factory=list)
    traces: set[str] = field(default_factory=set)

    def fail(self, where: str, seen: object, expected: object, trace_id: str | None = None) -> None:
        """Count one violation; the first few are kept."""
        self.wrong += 1
        if trace_id is not None:
            self.traces.add(trace_id)
        if len(self.examples) < EXAMPLES:
            self.examples.append(Violation(where, str(seen), str(expected)))
