"""Arms of an evaluation: a policy with its parameters, at a budget, in a mode."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cfkv.config import OnlineConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.evaluation._layers import with_layers
from cfkv.evaluation._names import parse_policy, policy_text
from cfkv.policies._base import Policy, make_policy, policy_kinds
from cfkv.policies._budget import Budget

FULL, RANDOM = "full", "random"
NO_BUDGET = "all"
NUMBER = r"\d+(?:\.\d+)?"
BUDGET = re.compile(
    rf"(?P<share>{NUMBER})%(?P<of>prompt)?|(?P<size>{NUMBER})(?P<unit>[KMGT]iB|B)|(?P<count>\d+)"
)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
LEGAL_BUDGETS = (
    "512 (tokens per KV head), 25% (of what follows the prompt, beside the prompt), 50%prompt, 64MiB"
)


@dataclass(frozen=True)
class BudgetText:
    """A budget as it was asked for, before the lengths of a trace are known."""

    text: str

    def __post_init__(self) -> None:
        found = BUDGET.fullmatch(self.text)
        if found is None or (found["share"] and float(found["share"]) > 100):
            raise CfkvError(f"budget {self.text!r} is not understood; legal: {LEGAL_BUDGETS}")

    def resolve(self, *, prompt_len: int, total: int, bytes_per_token: int) -> Budget:
        """Tokens per KV head, those that a policy protects included.

        A share is of the tokens that follow the prompt in the trace as it was written under the full cache, its own
        answer included, and comes on top of the prompt: so all policies hold as much, whether they protect the prompt
        or not, and at 100% nothing is ever evicted.
        """
        found = BUDGET.fullmatch(self.text)
        if found is None:
            raise CfkvError(f"budget {self.text!r} is not understood; legal: {LEGAL_BUDGETS}")
        if found["size"]:
            size = int(float(found["size"]) * UNITS[found["unit"]])
            return Budget.of_bytes(size, bytes_per_token)
        if found["count"]:
            return Budget(slots=int(found["count"]), asked=self.text)
        share = float(found["share"]) / 100
        base = 0 if found["of"] else prompt_len
        slots = base + Budget.of_fraction(share, prompt_len if found["of"] else total - prompt_len).slots
        try:
            return Budget(slots=slots, asked=self.text)
        except CfkvError as error:
            raise ItemError("budget_too_small", str(error)) from error


@dataclass(frozen=True)
class Arm:
    """`name` is that of its folder; `budget` None is the full cache."""

    policy: Policy
    mode: str
    positions: str
    budget: BudgetText | None

    @property
    def text(self) -> str:
        """The policy with those parameters that differ from the defaults."""
        return policy_text(self.policy)

    @property
    def name(self) -> str:
        """Unique among the arms of a run, and legal as the name of a folder."""
        policy = self.text.translate(str.maketrans(":;[]", "@+()", " "))  # brackets are wildcards in paths
        budget = NO_BUDGET if self.budget is None else self.budget.text.replace("%", "pct")
        parts = [self.mode, policy, budget]
        if self.positions != "absolute":
            parts.append(self.positions)
        return "-".join(parts)

    @property
    def columns(self) -> dict[str, Any]:
        """What identifies the arm in a row of `evaluations`."""
        name, _, parameters = self.text.partition(":")
        return {
            "arm": self.name,
            "policy": name,
            "parameters": parameters,
            "budget": NO_BUDGET if self.budget is None else self.budget.text,
            "mode": self.mode,
            "positions": self.positions,
        }


def arms(config: OnlineConfig) -> list[Arm]:
    """All arms of a configuration: the full cache first, random at each budget, then what was asked for.

    Raises
    ------
    CfkvError
        For an unknown policy or parameter, layers that another run does not give, or a budget that is not understood.
    """
    budgets = [BudgetText(text) for text in config.budgets]
    if not budgets:
        raise CfkvError(f"no budget given; legal: {LEGAL_BUDGETS}")
    found: dict[str, Arm] = {}
    full = Arm(make_policy(FULL), config.mode, "absolute", None)
    found[full.name] = full
    for policy in named_policies((RANDOM, *with_layers(config.policies, config.label))):
        if policy.schedule.kind == "never":
            continue
        for budget in budgets:
            arm = Arm(policy, config.mode, config.positions, budget)
            found.setdefault(arm.name, arm)
    return list(found.values())


def named_policies(texts: Sequence[str]) -> list[Policy]:
    """The policies of a list of texts; `all` stands for every registered one with its defaults."""
    found: dict[str, Policy] = {}
    for text in texts:
        names = policy_kinds.names() if text == "all" else [text]
        for name in names:
            policy = make_policy(*parse_policy(name))
            found.setdefault(policy_text(policy), policy)
    return list(found.values())


def acts_at_once(policy: Policy) -> bool:
    """Whether it acts at the end of what is fed, if at all; everything else decodes after the prompt."""
    return policy.schedule.kind in ("never", "once")


def traces_together(config: OnlineConfig, n_arms: int, batch_size: int) -> int:
    """Traces that are decoded together: so many that the batches are full."""
    return max(1, -(-2 * batch_size // (n_arms * config.samples)))


def needs_labels(policies: Sequence[Policy]) -> list[str]:
    """Names of the policies that are made from labels."""
    found = [policy.name for policy in policies if {"label", "shuffled_label"} & set(policy.needs)]
    return list(dict.fromkeys(found))


def settings(config: OnlineConfig) -> Mapping[str, Any]:
    """What of a configuration changes an arm's rows, for its fingerprint."""
    names = ("label", "items", "samples", "max_new_tokens", "answer_match", "seed", "simulate", "keep_sets")
    own = {name: getattr(config, name) for name in names}
    if config.samples > 1:
        own["temperature"] = config.temperature
    return own
