"""The table as Markdown, with a paragraph for each figure that is low."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.truth_table.explain import Figures, area, explained

LOW = 0.85

HEAD = """# Labels against the planted truth

Written by `{command}`: do not edit.

{traces} traces of the built-in model (seed {seed}); those with a right answer are labelled. Intervals: {interval}.

Each kind is held against the tokens that it can find. *occlusion* truth: `Rk`, digit and fused fact of each tagged
line; *cache* truth: digit and fused fact, which the answer reads from the cache. *AUROC of the label*: of the 0/1 token
label (for eviction KL, the tenth of a trace with the largest KL). *With perfect flips*: the same AUROC if every window
flipped just where it touches a load-bearing token. It is computed from the truth alone; what it lacks to 1 is smear,
since a window that touches a fact marks its neighbours too. *AUROC of the value*: of the mean delta NLL of the covering
windows, or of the mean KL. *Recall*: load-bearing tokens that are labelled. *Off the facts*: labelled among the tokens
outside tagged lines. *As planted*: windows that flip just where perfect ones do. n.s.: the interval of the AUROC holds
0.5, so that it is not significantly different from chance.

"""

COLUMNS = (
    "kind",
    "setting",
    "truth",
    "traces",
    "tokens",
    "AUROC of the label",
    "with perfect flips",
    "AUROC of the value",
    "recall",
    "off the facts",
    "as planted",
)


def page(content: Figures) -> str:
    """The whole Markdown file."""
    parts = [HEAD.format_map(content), _table(COLUMNS, [_line(row) for row in content["rows"]])]
    parts.append(f"\n## What lies below {LOW:g}, and why\n")
    parts += [explained(row) for row in content["rows"] if _is_low(row)]
    parts.append("## What single removals show of the model\n")
    parts.append(_parts([row for row in content["rows"] if "effect_by_part" in row["evidence"]]))
    parts += [_removal_table(row) for row in content["rows"] if "removals" in row["evidence"]]
    return "\n".join(parts).rstrip() + "\n"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _line(row: Figures) -> list[str]:
    perfect, planted = row.get("auroc_label_with_perfect_flips"), row.get("flips_as_planted")
    return [
        f"`{row['kind']}`",
        row["setting"],
        row["truth"],
        str(row["traces"]),
        f"{row['tokens']:,}",
        area(row["auroc_label"]),
        area(perfect) if perfect else "no windows",
        area(row["auroc_value"]),
        _share(row["recall"]),
        _share(row["labelled_off_facts"]),
        _share(planted) if planted else "no windows",
    ]


def _share(figure: Figures) -> str:
    if figure["estimate"] is None:
        return "none"
    if figure["low"] is None:
        return f"{figure['estimate']:.1%}"
    return f"{figure['estimate']:.1%} [{figure['low']:.1%}, {figure['high']:.1%}]"


def _is_low(row: Figures) -> bool:
    figures = (row["auroc_label"]["estimate"], row["auroc_value"]["estimate"])
    return any(figure is not None and figure < LOW for figure in figures)


def _parts(rows: Sequence[Figures]) -> str:
    """How often the loss of one token has an effect, by slot and part, one column per kind and part."""
    columns = [
        (row, part)
        for row in rows
        for part in ("tag", "digit", "fused fact")
        if _in_truth(row["truth"], part)
    ]
    head = ("slot", *(f"`{row['kind']}`: {part}" for row, part in columns))
    slots = [each["slot"] for each in rows[0]["evidence"]["effect_by_part"]] if rows else []
    lines = [
        [slot, *(f"{each[part]} of {each['n']}" for each, part in _at(columns, place))]
        for place, slot in enumerate(slots)
    ]
    return (
        "One token at a time, how often it has an effect: the answer flips (occlusion, knockout), or the KL at the "
        "boundary is at least 0.001 nats. A token without one is load-bearing by construction of the text, but the "
        "model has its fact from the other token. This, not the labels, is why recall is below 1 there.\n\n"
        + _table(head, lines)
        + "\n"
    )


def _at(columns: Sequence[tuple[Figures, str]], place: int) -> list[tuple[Figures, str]]:
    return [(row["evidence"]["effect_by_part"][place], part) for row, part in columns]


def _in_truth(truth: str, part: str) -> bool:
    return truth == "occlusion" or part != "tag"


def _removal_table(row: Figures) -> str:
    found = row["evidence"]
    lines = [
        [
            each["removed"],
            each["line"],
            f"{each['n']:,}",
            f"{each['mean_kl']:.2g}",
            f"{each['share_of_all_kl']:.1%}",
            f"{each['mostly_disturbs']} ({each['share_there']:.0%})",
        ]
        for each in found["by_removed_token"]
        if each["share_of_all_kl"] >= 0.005 or each["removed"] in ("fused fact", "fact digit")
    ]
    head = ("removed", "line", "removals", "mean KL, nats", "share of all KL", "mostly disturbs writing the")
    title = f"`eviction_kl`, {row['setting']}: {found['removals']:,} removals."
    return (
        f"{title} Rows with less than 0.5 % of all KL are left out but for facts.\n\n{_table(head, lines)}\n"
    )
