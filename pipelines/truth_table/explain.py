"""One paragraph for each figure that is low, from evidence that was measured with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Figures = Mapping[str, Any]


def area(figure: Figures) -> str:
    """An AUROC with its interval; one that is not significantly different from chance says so."""
    if figure["estimate"] is None:
        return "none"
    if figure["low"] is None:
        return f"{figure['estimate']:.3f}"
    chance = ", n.s." if figure["low"] <= 0.5 <= figure["high"] else ""
    return f"{figure['estimate']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]{chance}"


def explained(row: Figures) -> str:
    """One paragraph from the row's own evidence; a figure that nobody has looked into says so."""
    explanations: dict[str, Callable[[Figures], str]] = {
        "occlusion": _smeared,
        "knockout": _smeared,
        "truncation": _truncation,
        "eviction_kl": _eviction,
    }
    told = explanations.get(row["kind"])
    if row["kind"] == "eviction_kl" and "auroc_horizon_ends_before" not in row["evidence"]:
        told = None  # one checkpoint at the boundary: nothing low was found, so that nobody looked
    text = told(row) if told else "Not explained."
    return f"**`{row['kind']}`, {row['setting']}.** {text}\n"


def _smeared(row: Figures) -> str:
    found, perfect = row["evidence"], row["auroc_label_with_perfect_flips"]["estimate"]
    label = row["auroc_label"]["estimate"]
    text = (
        f"{row['flips_as_planted']['estimate']:.2%} of the windows flip as perfect ones would, and perfect ones give "
        f"{perfect:.3f}, the model's {label:.3f}. "
    )
    if perfect - label <= 0.02:
        text += "What the label lacks to 1 is the windows' smear: "
    else:
        text += (
            f"{perfect - label:.3f} is the model's, which misses {1 - row['recall']['estimate']:.1%} of the "
            "load-bearing tokens; the rest is the windows' smear: "
        )
    return (
        text
        + f"{found['labelled_share']:.1%} of the tokens are labelled, {found['load_bearing_share']:.1%} bear load."
    )


def _truncation(row: Figures) -> str:
    where = row["evidence"]["by_position"]
    before, on, after = (where[name] for name in ("before the facts", "on the facts", "after them"))
    return (
        "A cut loses all that follows, so that the label says where the last fact stands, not which tokens bear load: "
        f"{before['labelled']:.1%} of the tokens before the first load-bearing one are labelled, {on['labelled']:.1%} "
        f"from it to the last, {after['labelled']:.1%} after it, and {row['flips_as_planted']['estimate']:.2%} of the "
        "windows flip just where a load-bearing token is cut. Perfect flips give "
        f"{row['auroc_label_with_perfect_flips']['estimate']:.3f}. The value is largest at the start "
        f"({before['mean_value']:.2f} nats/token before the facts, {on['mean_value']:.2f} on them, "
        f"{after['mean_value']:.2g} after), where nothing bears load. This is the kind's known defect; it is kept to "
        "show it."
    )


def _eviction(row: Figures) -> str:
    found = row["evidence"]
    reach, early = found["auroc_horizon_reaches_answer"], found["auroc_horizon_ends_before"]
    facts = {"fused fact", "fact digit"}
    lines = found["by_removed_token"]
    share = sum(each["share_of_all_kl"] for each in lines if each["removed"] in facts)
    near = sum(each["share_of_all_kl"] for each in lines if each["line"] == "this line")
    fused = found["kl_per_written_token"]["fused fact"]
    top = ", ".join(
        f"{each['removed']} of {_which(each['line'])} {each['share_of_all_kl']:.0%} (in writing the next "
        f"{each['mostly_disturbs']})"
        for each in lines[:5]
    )
    distances = found["by_distance"]
    text = (
        "The KL asks what the next tokens need, and fused facts are read when the answer is written. "
        f"Of all KL, {near:.0%} is that of tokens of the line being written, and only {share:.0%} that of digits and "
        f"fused facts of tagged lines, running values included. The largest shares: {top}. The mean KL falls from "
        f"{distances[0]['mean_kl']:.2g} nats for the last {distances[0]['to']} tokens to "
        f"{distances[-1]['mean_kl']:.2g} beyond {distances[-1]['from'] - 1}."
    )
    if fused["answer facts"] is not None:
        text += (
            f" A removed fused fact costs {fused['answer facts']:.2g} nats where a fact of the answer is written, and "
            f"{fused['anything else']:.1g} anywhere else."
        )
    text += (
        f" So the AUROC is that of the horizon: {area(early)} over the {early['removals']:,} removals whose horizon "
        "ends before the facts of the answer"
    )
    if reach["removals"]:
        text += (
            f", {area(reach)} over the {reach['removals']:,} (in {reach['traces']} traces) whose horizon reaches the "
            "first of them"
        )
    return text + ". A horizon over the whole answer has a line of its own in the table."


def _which(line: str) -> str:
    return {"earlier": "earlier lines"}.get(line, line)
