"""Rewrite the generated tables of the README from the registries.

python pipelines/readme_tables.py            # rewrites README.md
"""

from __future__ import annotations

from pathlib import Path

from cfkv.listing import first_line

README = Path(__file__).resolve().parent.parent / "README.md"


def tables() -> dict[str, str]:
    """Markdown of each generated block, by its name."""
    from cfkv.labels._base import label_kinds
    from cfkv.policies._base import make_policy, policy_kinds
    from cfkv.problems._base import problem_sources
    from cfkv.signals._base import horizon_text, signal_kinds

    signals = ["| signal | group | unit | layers | causal | source |", "|---|---|---|---|---|---|"]
    for signal in signal_kinds.members():
        layers = "embedding and blocks" if signal.embedding else "blocks" if signal.layered else "none"
        causal = horizon_text(signal.horizon)
        signals.append(
            f"| `{signal.name}` | {signal.group} | {signal.unit} | {layers} | {causal} | {signal.source} |"
        )
    labels = ["| label | what it does | value | source |", "|---|---|---|---|"]
    labels += [
        f"| `{label.name}` | {first_line(label.__doc__)} | {label.unit}; {label.sign} | {label.source} |"
        for label in label_kinds.members()
    ]
    policies = ["| policy | what it keeps | a mask per | acts | source |", "|---|---|---|---|---|"]
    masks = {"global": "model", "layer": "layer", "kv_head": "KV head"}
    policies += [
        f"| `{kind.name}` | {first_line(kind.__doc__)} | {masks[kind.mask_scope]} | {make_policy(kind.name).schedule} "
        f"| {kind.source} |"
        for kind in policy_kinds.members()
    ]
    problems = ["| dataset | `--path` | answer | licence | source |", "|---|---|---|---|---|"]
    problems += [
        f"| `{source.name}` | {'needed' if source.needs_path else 'no'} | {source.answer_format} | {source.licence} "
        f"| {source.source} |"
        for source in problem_sources.members()
    ]
    found = {"signals": signals, "labels": labels, "policies": policies, "problems": problems}
    return {name: "\n".join(lines) for name, lines in found.items()}


def rewritten(text: str) -> str:
    """`text` with each block between its markers replaced."""
    for name, table in tables().items():
        start, end = f"<!-- {name}: generated -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"README.md has no block between {start.strip()!r} and {end!r}")
        text = f"{before}{start}{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
