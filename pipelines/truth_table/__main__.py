"""All label kinds of the built-in model against the truth that was planted in its problems.

    python -m pipelines.truth_table RUN_FOLDER --traces 100

Makes (or resumes) one run per line of the table, scores it, and writes data/benchmarks/truth_table.json and .md.
About three minutes on one idle core; RUN_FOLDER takes some 5 MB. Run from the repository root.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipelines.truth_table.page import page
from pipelines.truth_table.runs import make
from pipelines.truth_table.table import build

OUT = Path(__file__).resolve().parents[2] / "data" / "benchmarks"


def main() -> None:
    """Make, score, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the runs are; the same command continues there")
    parser.add_argument("--traces", type=int, default=100, help="problems; the answer of nearly all is right")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of truth_table.json and truth_table.md")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    make(given.folder, given.traces, device=given.device)
    content = build(given.folder, given.traces)
    given.out.mkdir(parents=True, exist_ok=True)
    text = page(content)
    (given.out / "truth_table.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (given.out / "truth_table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
