"""What a run says of policies, as a page and JSON: accuracy at budgets, validity against labels, both together.

    python -m pipelines.policy_study RUN --name policies_builtin

RUN was made by `cfkv run pipelines/policies_builtin.yaml` (or another recipe with `online`), and, for the two parts
about validity, by `cfkv evaluate offline RUN`. Run from the repository root; takes seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipelines.policy_study.page import page
from pipelines.policy_study.study import study

OUT = Path(__file__).resolve().parents[2] / "data" / "benchmarks"


def main() -> None:
    """Read, write, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="run directory with evaluations")
    parser.add_argument("--name", required=True, help="stem of the two files")
    parser.add_argument("--kind", default="knockout", help="label kind whose validity is shown")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the two files")
    given = parser.parse_args()
    content = study(given.run, given.kind)
    given.out.mkdir(parents=True, exist_ok=True)
    text = page(content)
    (given.out / f"{given.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (given.out / f"{given.name}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
