"""The card of a policy: what it keeps, from where, what it needs, when it acts. Made from its declarations alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from cfkv.policies._base import Policy, Protection, make_policy, policy_kinds

# Where protection is shown: a budget and a prompt that no fixed window reaches.
EXAMPLE_SLOTS, EXAMPLE_PROMPT, EXAMPLE_STEP = 1024, 200, 4096
SCOPES = {
    "global": "one keep set for all layers and heads",
    "layer": "one keep set per layer",
    "kv_head": "one keep set per KV head",
}


def policy_card(name: str) -> list[tuple[str, str]]:
    """Heading and text of each entry of the card of the policy called `name`.

    Raises
    ------
    CfkvError
        For an unknown name (with the nearest).
    """
    kind, policy = policy_kinds.get(name), make_policy(name)
    simulated = policy.ragged and not policy.by_layer
    return [
        ("policy", name),
        ("what it keeps", " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())),
        ("score", kind.equation),
        ("source", kind.source),
        ("deviations", kind.deviations or "none"),
        ("acts", str(policy.schedule)),
        ("evicts by", SCOPES[kind.mask_scope]),
        ("protects", protected(policy)),
        ("reads", ", ".join(reads(policy)) or "positions alone"),
        ("eviction", "simulated by masks: heads keep different numbers" if simulated else "physical"),
        ("notes", "; ".join(notes(policy)) or "none"),
        ("parameters", "\n".join(parameter_lines(kind)) or "none"),
    ]


def protected(policy: Policy) -> str:
    """What is never evicted, in words, at a budget of EXAMPLE_SLOTS."""
    found: Protection = policy.protection(EXAMPLE_SLOTS, EXAMPLE_PROMPT, EXAMPLE_STEP)
    parts = []
    if found.prompt:
        parts.append("the prompt")
    if found.sinks:
        parts.append(f"the first {found.sinks}")
    if found.recent:
        parts.append(f"the newest {found.recent}")
    return " and ".join(parts) + f" (at a budget of {EXAMPLE_SLOTS:,})" if parts else "nothing"


def reads(policy: Policy) -> Iterator[str]:
    """Columns of the cache and of new tokens, with the number of query rows."""
    for name in policy.needs:
        rows = f" of the last {policy.window}" if name in ("attention", "queries") else ""
        yield f"{name}{rows}"
    for name in policy.observes:
        yield f"{name} of every token as it comes"


def notes(policy: Policy) -> Iterator[str]:
    """Properties that a reader of its results should know."""
    if policy.frozen:
        yield "a token's score never changes"
    if not policy.nested:
        yield "a larger budget may drop what a smaller one keeps"
    if not policy.fills:
        yield "an eviction may leave less than the budget"
    if policy.compact:
        yield "kept keys are rotated to contiguous positions"


def parameter_lines(kind: type[Policy]) -> Iterator[str]:
    """`name = default` of each parameter, with its description if it has one."""
    for each in fields(kind):  # type: ignore[arg-type]
        given: Any = each.default
        default = getattr(given, "default", given)
        text = getattr(given, "description", None)
        shown = "" if default is MISSING else f" = {list(default) if isinstance(default, tuple) else default}"
        yield f"{each.name}{shown}" + (f"  ({text})" if text else "")
