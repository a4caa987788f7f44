"""MATH-500: the 500-problem subset of Hendrycks MATH (arXiv:2305.20050, arXiv:2103.03874)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from cfkv.problems._base import Problem, ProblemSource, problem_sources
from cfkv.problems._files import needed_path, read_records, record_id, text_field


@problem_sources.register
class Math500(ProblemSource):
    """Rows with `problem`, `solution`, `answer`, `unique_id`. Grade with --answer-match math."""

    source: ClassVar[str] = "huggingface.co/datasets/HuggingFaceH4/MATH-500"
    licence: ClassVar[str] = "MIT"
    answer_format: ClassVar[str] = "LaTeX"
    needs_path: ClassVar[bool] = True

    def load(self, path: Path | None, *, seed: int) -> Iterator[Problem]:
        """Yield the problems in file order."""
        for number, place, record in read_records(needed_path(path, self.name)):
            yield Problem(
                problem_id=record_id(record, number, "math500", place),
                question=text_field(record, "problem", place),
                answer=text_field(record, "answer", place),
                solution=text_field(record, "solution", place),
            )
