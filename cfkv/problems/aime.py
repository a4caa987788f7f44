"""AIME competition problems, from a file of yours: the texts are not ours to redistribute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from cfkv.problems._base import Problem, ProblemSource, problem_sources
from cfkv.problems._files import answer_field, needed_path, optional_text, read_records, record_id, text_field


@problem_sources.register
class Aime(ProblemSource):
    """Rows with `problem`, `answer` (an integer from 0 to 999, as text) and `id`; `solution` is optional."""

    source: ClassVar[str] = "maa.org; e.g. huggingface.co/datasets/HuggingFaceH4/aime_2024"
    licence: ClassVar[str] = "copyright MAA; for evaluation only"
    answer_format: ClassVar[str] = "an integer from 0 to 999"
    needs_path: ClassVar[bool] = True

    def load(self, path: Path | None, *, seed: int) -> Iterator[Problem]:
        """Yield the problems in file order."""
        for number, place, record in read_records(needed_path(path, self.name)):
            yield Problem(
                problem_id=f"aime-{record_id(record, number, 'problem', place)}",
                question=text_field(record, "problem", place),
                answer=answer_field(record, "answer", place),
                solution=optional_text(record, "solution", place),
            )
