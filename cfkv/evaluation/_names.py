"""Policies as users write them: `h2o`, or `h2o:recent_share=0.25;...`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, ClassVar

import yaml

from cfkv.errors import CfkvError
from cfkv.policies._base import Policy, make_policy, parameters, policy_kinds
from cfkv.policies.streaming_llm import StreamingLlm

ALL = "all"


@parameters
class Position(StreamingLlm):
    """The token's index alone: what any score should beat that claims to see more than age."""

    name: ClassVar[str] = "position"
    source: ClassVar[str] = "cfkv control"


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of a text; values are YAML.

    Raises
    ------
    CfkvError
        If a parameter has no value.
    """
    name, _, rest = text.strip().partition(":")
    options: dict[str, Any] = {}
    for piece in filter(None, (piece.strip() for piece in rest.split(";"))):
        key, equals, value = piece.partition("=")
        if not equals or not value.strip():
            raise CfkvError(
                f"policy {text!r}: {piece!r} is no parameter=value; write such as h2o:recent_share=0.25, several "
                "parameters with ; between them"
            )
        try:
            options[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise CfkvError(f"policy {text!r}: the value {value!r} is not valid YAML") from error
    return name, options


def policy_text(policy: Policy) -> str:
    """The policy as a user would write it: parameters in alphabetical order, those at their defaults left out."""
    changed = []
    for each in fields(policy):  # type: ignore[arg-type]
        default = each.default if each.default is not MISSING else None
        default = getattr(default, "default", default)  # a pydantic Field
        value = getattr(policy, each.name)
        if value != default:
            shown = list(value) if isinstance(value, tuple) else value
            changed.append(f"{each.name}={yaml.safe_dump(shown, default_flow_style=True).splitlines()[0]}")
    return policy.name + (":" + ";".join(sorted(changed)) if changed else "")


def scoring_policies() -> list[Policy]:
    """Every registered policy that chooses by its score: not those that never act or keep what is protected alone."""
    made = [make_policy(name) for name in policy_kinds.names()]
    return [p for p in made if p.schedule.kind != "never" and not p.equation.startswith("none")]


def named_policies(texts: Sequence[str]) -> dict[str, Policy]:
    """Policies by their text, `all` standing for every one that scores; random and position come first.

    Raises
    ------
    CfkvError
        For an unknown name or parameter, with the nearest, or an illegal value.
    """
    found: dict[str, Policy] = {"random": make_policy("random"), "position": Position(sinks=4)}
    for text in texts:
        if text == ALL:
            found |= {policy.name: policy for policy in scoring_policies() if policy.name not in found}
        elif text != "position":
            policy = make_policy(*parse_policy(text))
            found.setdefault(policy_text(policy), policy)
    return found
