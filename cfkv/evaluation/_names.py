"""Policies as users write them: `h2o`, or `h2o:recent_share=0.25;...`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import yaml

from cfkv.errors import CfkvError
from cfkv.policies._base import Policy


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
