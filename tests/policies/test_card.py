"""Cards are made of declarations, for every policy."""

from __future__ import annotations

import pytest

from cfkv.cli import main
from cfkv.errors import CfkvError
from cfkv.policies._base import policy_kinds
from cfkv.policies._card import policy_card


@pytest.mark.parametrize("name", policy_kinds.names())
def test_every_policy_has_a_whole_card(name: str) -> None:
    card = dict(policy_card(name))
    assert card["policy"] == name
    assert all(text.strip() for text in card.values())
    assert card["what it keeps"].endswith((".", "!"))


def test_card_of_h2o_and_of_a_simulated_policy() -> None:
    card = dict(policy_card("h2o"))
    assert card["acts"] == "every step"
    assert card["protects"] == "the newest 512 (at a budget of 1,024)"  # half of it
    assert card["reads"] == "attention of every token as it comes"
    assert card["parameters"] == "recent_share = 0.5"
    assert card["eviction"] == "physical"
    assert dict(policy_card("ada_kv"))["eviction"].startswith("simulated by masks")
    assert dict(policy_card("epikv"))["protects"].startswith("the prompt and the newest 128")
    assert dict(policy_card("r_kv"))["acts"] == "every 128 steps"


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["ls", "policies", "tova"])
    assert done.value.code == 0
    assert "TOVA" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["ls", "labels", "occlusion"])
    assert done.value.code == 2
    assert "only policies have cards" in capsys.readouterr().err
    with pytest.raises(CfkvError, match="did you mean 'h2o'"):
        policy_card("h20")
