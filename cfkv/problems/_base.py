"""The contract of a problem source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cfkv.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question with its reference answer.

    `question` is what the model is asked (without any chat markup); `solution` is a worked solution in
    plain text where the source has one; `row` says where it came from, for messages.
    """

    problem_id: str
    question: str
    answer: str
    solution: str | None = None


class ProblemSource(ABC):
    """Yields problems in a fixed order with unique, stable ids.

    Class attributes: `source` (origin, with a link or citation), `licence`, `needs_path` (True where the
    texts come from a file that the user names), `answer_format` (one line: what a graded answer looks like).
    """

    name: ClassVar[str]
    source: ClassVar[str]
    licence: ClassVar[str]
    answer_format: ClassVar[str]
    needs_path: ClassVar[bool] = False

    @abstractmethod
    def load(self, path: Path | None, *, seed: int) -> Iterator[Problem]:
        """Yield the problems; `seed` only matters to sources that generate them.

        Raises
        ------
        CfkvError
            For a file that is missing or malformed: names the line, what was found and what is legal.
        """


problem_sources: Registry[ProblemSource] = Registry("dataset", "cfkv.problems")
