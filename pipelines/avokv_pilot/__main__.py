"""AvoKV-E's pilot: the payload weight and the delay, chosen on one run's problems and judged on another's.

    cfkv trace runs/pilot --seed 1 --limit 200 --max-new-tokens 384
    cfkv trace runs/test --seed 2 --limit 200 --max-new-tokens 384
    python -m pipelines.avokv_pilot runs/pilot runs/test --budgets 25%,50% --every 16

Evaluates avokv_e on PILOT at every weight and delay of the grid, picks the most accurate setting of each budget (ties:
the smaller weight, then the smaller delay), and evaluates the pick, the default and r_kv on TEST. Both runs need traces
by one model of different problems, and keep the arms as rows of their own: the same command continues, and `cfkv
evaluate online` adds to them. The paper compresses every 128 tokens: on shorter traces nothing would happen, hence
--every. Writes avokv_pilot.json and avokv_pilot.md. Run from the repository root.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cfkv.errors import CfkvError
from pipelines.avokv_pilot.page import page
from pipelines.avokv_pilot.pilot import DELAYS, WEIGHTS, Sweep, build

OUT = Path(__file__).resolve().parents[2] / "data" / "benchmarks"


def main() -> None:
    """Sweep, pick, judge, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pilot", type=Path, help="run with the traces on which is chosen")
    parser.add_argument("test", type=Path, help="run with traces of other problems, on which is judged")
    parser.add_argument("--budgets", default="25%", help="as in `cfkv evaluate online`, commas between them")
    parser.add_argument("--every", type=int, default=128, help="tokens between evictions")
    parser.add_argument("--weights", default=",".join(f"{each:g}" for each in WEIGHTS), help="of the payload")
    parser.add_argument("--delays", default=",".join(map(str, DELAYS)), help="newest tokens protected")
    parser.add_argument(
        "--max-new-tokens", type=int, default=None, help="cap on an answer; default: the run's"
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of avokv_pilot.json and avokv_pilot.md")
    given = parser.parse_args()
    try:
        content = build(
            Sweep(
                pilot=given.pilot,
                test=given.test,
                budgets=tuple(given.budgets.split(",")),
                every=given.every,
                weights=tuple(float(each) for each in given.weights.split(",")),
                delays=tuple(int(each) for each in given.delays.split(",")),
                max_new_tokens=given.max_new_tokens,
                batch_size=given.batch_size,
                device=given.device,
            )
        )
    except (CfkvError, ValueError) as error:
        sys.exit(f"error: {error}")
    given.out.mkdir(parents=True, exist_ok=True)
    text = page(content)
    (given.out / "avokv_pilot.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (given.out / "avokv_pilot.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
