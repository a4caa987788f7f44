"""Any problems in a JSONL or Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from cfkv.problems._base import Problem, ProblemSource, problem_sources
from cfkv.problems._files import answer_field, needed_path, optional_text, read_records, record_id, text_field


@problem_sources.register
class Jsonl(ProblemSource):
    """Rows with `question` (or `problem`) and `answer`; optional `problem_id` (or `id`) and `solution`."""

    source: ClassVar[str] = "your own file"
    licence: ClassVar[str] = "yours"
    answer_format: ClassVar[str] = "text that a boxed answer is compared with"
    needs_path: ClassVar[bool] = True

    def load(self, path: Path | None, *, seed: int) -> Iterator[Problem]:
        """Yield the problems in file order."""
        for number, place, record in read_records(needed_path(path, self.name)):
            yield Problem(
                problem_id=record_id(record, number, "problem", place),
                question=text_field(record, ("question", "problem"), place),
                answer=answer_field(record, "answer", place),
                solution=optional_text(record, "solution", place),
            )
