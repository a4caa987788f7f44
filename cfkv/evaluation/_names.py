"""Policies as text: `h2o`, or `h2o:recent_share=0.25`, parameters that differ from the defaults apart by `;`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
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
    """Name and parameters of `name:parameter=value;parameter=value`; values are read as YAML.

    Raises
    ------
    CfkvError
        For a text of another form; whether the names exist is `make_policy`'s to say.
    """
    name, colon, rest = text.partition(":")
    if not name.strip() or (colon and not rest.strip()):
        raise CfkvError(f"policy {text!r}: write name, or name:parameter=value;parameter=value")
    options: dict[str, Any] = {}
    for setting in filter(None, (part.strip() for part in rest.split(";"))):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not key:
            raise CfkvError(
                f"policy {text!r}: {setting!r} has no '='; write name:parameter=value;parameter=value"
            )
        if key in options:
            raise CfkvError(f"policy {text!r}: {key} is given twice; leave one out")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise CfkvError(
                f"policy {text!r}: {value!r} is not valid YAML; quote it if it is plain text"
            ) from error
    return name.strip(), options


def policy_text(policy: Policy) -> str:
    """The text that `parse_policy` reads as this policy."""
    made: Any = policy
    defaults = type(made)()
    settings = [
        f"{each.name}={_value(getattr(made, each.name))}"
        for each in fields(made)
        if getattr(made, each.name) != getattr(defaults, each.name)
    ]
    return ":".join([policy.name, ";".join(settings)] if settings else [policy.name])


def _value(value: Any) -> str:
    if isinstance(value, str) and value.replace("_", "").isalnum() and yaml.safe_load(value) == value:
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value, separators=(",", ": "))


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
