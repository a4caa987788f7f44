"""GSM8K: grade-school word problems with worked solutions (Cobbe et al., arXiv:2110.14168)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from cfkv.errors import CfkvError
from cfkv.problems._base import Problem, ProblemSource, problem_sources
from cfkv.problems._files import needed_path, read_records, text_field

CALCULATOR = re.compile(r"<<[^<>]*>>")
FINAL_LINE = re.compile(r"\n?####\s*(?P<answer>\S.*?)\s*$")


@problem_sources.register
class GSM8K(ProblemSource):
    """Rows with `question` and `answer`; the answer ends with a line `#### N`.

    The calculator marks `<<...>>` and the final line are taken out of the solution.
    """

    source: ClassVar[str] = "github.com/openai/grade-school-math (arXiv:2110.14168)"
    licence: ClassVar[str] = "MIT"
    answer_format: ClassVar[str] = "a number"
    needs_path: ClassVar[bool] = True

    def load(self, path: Path | None, *, seed: int) -> Iterator[Problem]:
        """Yield the problems in file order."""
        for number, place, record in read_records(needed_path(path, self.name)):
            worked = text_field(record, "answer", place)
            final = FINAL_LINE.search(worked)
            if final is None:
                raise CfkvError(f"{place}: field 'answer' has no final line '#### N'; is this GSM8K?")
            yield Problem(
                problem_id=f"gsm8k-{number:05d}",
                question=text_field(record, "question", place),
                answer=final["answer"],
                solution=CALCULATOR.sub("", worked[: final.start()]).strip(),
            )
