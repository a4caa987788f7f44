"""Where a low figure comes from, measured on the same runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cfkv.loader import load
from cfkv.problems.registers import FILLER_WORDS
from pipelines.truth_table.scores import Planted, pooled_auroc

ANSWER_FACT = "answer fact"
LINES = ("this line", "the line before", "earlier")
DISTANCES = (1, 9, 17, 33, 65)  # tokens back from the checkpoint, lower edges
NOTHING = 1e-3  # nats; a removal below this changed nothing that matters


@dataclass(frozen=True)
class Roles:
    """What each token of a trace is, and in which line of the reasoning or prompt it stands."""

    names: list[str]
    lines: list[int]


def roles_of(trace: Planted) -> Roles:
    """`filler`, `name`, `operation`, `digit`, `tag`, `fused fact`, `;` inside the reasoning (digits of tagged lines are
    `fact digit`s), `answer fact` in the box, `closing` for the rest after the reasoning, `prompt` before it."""
    names, lines, line = [], [], 0
    for place, word in enumerate(trace.words):
        line += word.startswith("%")
        lines.append(line)
        if place < trace.start:
            names.append("prompt")
        elif place >= trace.stop:
            names.append(ANSWER_FACT if word.startswith("R") else "closing")
        else:
            names.append(_role(word, on_fact=bool(trace.truth.fact[place - trace.start])))
    return Roles(names, lines)


def _role(word: str, *, on_fact: bool) -> str:
    if word in FILLER_WORDS:
        return "filler"
    if word.isdigit():
        return "fact digit" if on_fact else "digit"
    if word.startswith("R"):
        return "fused fact" if "=" in word else "tag"
    return {"%": "name", ";": ";"}.get(word[0], "operation")


@dataclass(frozen=True)
class Removal:
    """One removed token at one checkpoint; `written` are the roles of the tokens that the KL is about, by offset.

    The KL of offset i is about the token that follows the i-th replayed one.
    """

    trace: int
    role: str
    line: str
    distance: int
    bearing: bool
    kl: float
    by_offset: list[float]
    written: list[str]

    @property
    def at_answer(self) -> bool:
        """Whether some fact of the answer is among the tokens."""
        return ANSWER_FACT in self.written


def removals(run: Path, traces: Sequence[Planted]) -> list[Removal]:
    """All single removals of a run."""
    known = {trace.trace_id: (index, trace, roles_of(trace)) for index, trace in enumerate(traces)}
    found = []
    table = load(run).eviction_kl.select("trace_id", "step", "blocks", "kl", "kl_by_offset").collect()
    for trace_id, step, blocks, kl, by_offset in table.iter_rows():
        index, trace, roles = known[trace_id]
        place = blocks[0]["start"]
        back = roles.lines[step - 1] - roles.lines[place]
        found.append(
            Removal(
                trace=index,
                role=roles.names[place],
                line=LINES[min(back, 2)],
                distance=step - place,
                bearing=bool(trace.truth.cache[place - trace.start]),
                kl=kl,
                by_offset=by_offset,
                written=roles.names[step + 1 : step + 1 + len(by_offset)],
            )
        )
    return found


def by_role(found: Iterable[Removal]) -> list[dict[str, Any]]:
    """Per role and line: how many, mean KL, share of all KL, and the role whose writing it disturbs most."""
    groups: dict[tuple[str, str], list[Removal]] = defaultdict(list)
    for each in found:
        groups[each.role, each.line].append(each)
    total = sum(each.kl for members in groups.values() for each in members)
    rows = []
    for (role, line), members in groups.items():
        disturbed: dict[str, float] = defaultdict(float)
        for each in members:
            for written, kl in zip(each.written, each.by_offset, strict=False):
                disturbed[written] += kl
        most = max(disturbed, key=lambda name: disturbed[name])
        rows.append(
            {
                "removed": role,
                "line": line,
                "n": len(members),
                "mean_kl": float(np.mean([each.kl for each in members])),
                "share_of_all_kl": sum(each.kl for each in members) / total,
                "mostly_disturbs": most,
                "share_there": disturbed[most] / sum(disturbed.values()),
            }
        )
    return sorted(rows, key=lambda row: -row["share_of_all_kl"])


def by_distance(found: Sequence[Removal]) -> list[dict[str, Any]]:
    """Mean KL by how far back the removed token stood."""
    rows = []
    for low, high in zip(DISTANCES, (*DISTANCES[1:], 10**9), strict=True):
        inside = [each.kl for each in found if low <= each.distance < high]
        if not inside:
            continue
        last = None if high == 10**9 else high - 1
        rows.append({"from": low, "to": last, "n": len(inside), "mean_kl": float(np.mean(inside))})
    return rows


def by_written(found: Iterable[Removal], role: str) -> dict[str, float]:
    """Mean KL per written token when a token of `role` is gone: where a fact of the answer is written, or not."""
    at_answer, elsewhere = list[float](), list[float]()
    for each in found:
        if each.role == role:
            for written, kl in zip(each.written, each.by_offset, strict=False):
                (at_answer if written == ANSWER_FACT else elsewhere).append(kl)
    return {
        "answer facts": float(np.mean(at_answer)) if at_answer else float("nan"),
        "anything else": float(np.mean(elsewhere)) if elsewhere else float("nan"),
    }


def auroc_of(found: Iterable[Removal], n_traces: int) -> dict[str, Any]:
    """AUROC of single removals against the cache truth, one row per removal and checkpoint, traces resampled."""
    values: list[list[float]] = [[] for _ in range(n_traces)]
    truth: list[list[bool]] = [[] for _ in range(n_traces)]
    for each in found:
        values[each.trace].append(each.kl)
        truth[each.trace].append(each.bearing)
    estimate = pooled_auroc(values, truth)
    return {
        "estimate": estimate.estimate,
        "low": estimate.low,
        "high": estimate.high,
        "removals": sum(len(each) for each in values),
        "traces": sum(bool(each) for each in values),
    }


def by_part(traces: Sequence[Planted]) -> list[dict[str, Any]]:
    """Single removals of each slot's tag, digit and fused fact: how many have an effect.

    An effect is a flip where answers were regenerated, else a value of at least `NOTHING`.
    """
    seen: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        words = trace.reasoning
        hits = trace.importance == 1 if (trace.importance >= 0).any() else trace.value >= NOTHING
        for place in np.flatnonzero(trace.truth.fused):
            slot = words[place].partition("=")[0]
            tag = max(at for at in range(place) if words[at] == slot)
            for part, at in (("tag", tag), ("digit", place - 1), ("fused fact", place)):
                seen[slot][part].append(bool(hits[at]))
    return [
        {"slot": slot, "n": len(parts["tag"]), **{part: sum(found) for part, found in parts.items()}}
        for slot, parts in sorted(seen.items())
    ]


def by_position(traces: Sequence[Planted]) -> Mapping[str, dict[str, float]]:
    """Labelled share and mean value before the first load-bearing token, from it to the last, and after it."""
    parts: dict[str, list[tuple[float, float]]] = {
        "before the facts": [],
        "on the facts": [],
        "after them": [],
    }
    for trace in traces:
        places = np.flatnonzero(trace.truth.occlusion)
        edges = (0, places[0], places[-1] + 1, len(trace.importance))
        for name, first, stop in zip(parts, edges[:-1], edges[1:], strict=True):
            parts[name] += list(zip(trace.importance[first:stop], trace.value[first:stop], strict=True))
    return {
        name: {
            "n": len(rows),
            "labelled": float(np.mean([label for label, _ in rows])),
            "mean_value": float(np.mean([value for _, value in rows])),
        }
        for name, rows in parts.items()
    }
