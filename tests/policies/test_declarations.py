"""Mask scope, schedule and protection of every policy, as methods 0.5 and the sections of the policies have them."""

from __future__ import annotations

import pytest
import torch

from cfkv.policies._base import make_policy, policy_kinds

PROMPT, STEP = 40, 2000
# scope, when it acts, then how many first and how many last tokens are protected at budgets of 64 and of 1,024
HARNESS = ("global", "every step", (40, 16), (40, 128))  # prompt and min(128, K / 4)
CONTROL = (
    "global",
    "every step",
    (40, 6),
    (40, 128),
)  # prompt and min(128, (K - prompt) / 4): 24 / 4, 984 / 4
PAGE = ("global", "once", (4, 32), (4, 32))
AVOKV = ("kv_head", "every 128 steps", (4, 32), (4, 8))
WINDOW = ("kv_head", "once", (0, 32), (0, 32))
NOTHING = (0, 0)
EXPECTED = {
    "full": ("global", "never", NOTHING, NOTHING),
    "random": CONTROL,
    "oracle": CONTROL,
    "anti_oracle": CONTROL,
    "shuffled_oracle": CONTROL,
    "random_page": PAGE,
    "streaming_llm": ("global", "every step", (4, 0), (4, 0)),
    "streaming_llm_rerotated": ("global", "every step", (4, 0), (4, 0)),
    "streaming_llm_36": PAGE,
    "h2o": ("kv_head", "every step", (0, 32), (0, 512)),
    "h2o_global": ("global", "every step", (4, 16), (4, 128)),
    "h2o_page": PAGE,
    "scissorhands": ("kv_head", "every step", (0, 10), (0, 10)),
    "tova": ("layer", "every step", NOTHING, NOTHING),
    "longflow": ("layer", "every step", NOTHING, NOTHING),
    "snapkv": WINDOW,
    "snapkv_decode": ("kv_head", "every 128 steps", (0, 8), (0, 8)),
    "snapkv_page": PAGE,
    "snapkv_layer": ("layer", *PAGE[1:]),
    "snapkv_head": ("kv_head", *PAGE[1:]),
    "pyramidkv": WINDOW,
    "pyramidkv_page": PAGE,
    "ada_kv": WINDOW,
    "ada_kv_fill": WINDOW,
    "chunkkv": ("layer", *WINDOW[1:]),
    "keydiff": ("kv_head", "every 128 steps", (0, 16), (0, 128)),
    "keydiff_raw": ("kv_head", "every 128 steps", (0, 16), (0, 128)),
    "knorm": ("kv_head", "every step", NOTHING, NOTHING),
    # tail 2000 - 16 = 15 * 128 + 64: the last full partition and 64 more; 2000 - 4 = 15 * 128 + 76
    "lagkv": ("kv_head", "every 128 steps", (16, 192), (16, 192)),
    "lagkv_rank": ("kv_head", "every 128 steps", (4, 204), (4, 204)),
    "manifoldkv": ("kv_head", "once", NOTHING, NOTHING),
    "manifoldkv_prerotary": ("kv_head", "once", NOTHING, NOTHING),
    "manifoldkv_windowed": ("kv_head", "once", NOTHING, NOTHING),
    "manifoldkv_page": PAGE,
    "capkv": ("kv_head", "once", (4, 0), (4, 0)),
    "caote": ("kv_head", "every step", NOTHING, NOTHING),
    "fast_caote": ("kv_head", "every step", NOTHING, NOTHING),
    "ahakv": ("kv_head", "every step", (0, 32), (0, 32)),
    "raas": ("layer", "every step", (40, 0), (40, 0)),
    "raas_epikv": ("global", "every step", (40, 0), (40, 0)),
    "thinkv_original": ("kv_head", "every 128 tokens", NOTHING, NOTHING),
    "thinkv_epikv": ("global", "every step", (0, 16), (0, 128)),
    "r_kv": ("kv_head", "every 128 steps", (0, 8), (0, 8)),
    "lazy_eviction": ("kv_head", "every 32 steps", (0, 32), (0, 32)),
    "avokv_e": AVOKV,
    "avokv_e_raw": AVOKV,
    "avokv_e_no_payload": AVOKV,
    "avokv_e_no_redundancy": AVOKV,
    "avokv_e_recency": AVOKV,
    "avokv_e_rkv_anchor": AVOKV,
    "avokv_e_rkv_payload": AVOKV,
    "avokv_e_no_delay": ("kv_head", "every 128 steps", (4, 0), (4, 0)),
    "epikv": HARNESS,
    "epikv_raw": HARNESS,
    "epikv_ema": HARNESS,
    "epikv_ema_slow": HARNESS,
    "epikv_rolling_mean": HARNESS,
    "epikv_band": HARNESS,
    "epikv_attention": HARNESS,
    "epikv_lag_key": HARNESS,
    "epikv_lag_kv": HARNESS,
    "kv_key": HARNESS,
    "kv_val": HARNESS,
    "segment_hybrid": HARNESS,
    "segment_hybrid_keys": HARNESS,
}


def test_every_policy_is_there() -> None:
    assert set(EXPECTED) == set(policy_kinds.names())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_scope_schedule_and_protection(name: str) -> None:
    policy = make_policy(name)
    scope, when, *protected = EXPECTED[name]
    assert (policy.mask_scope, str(policy.schedule)) == (scope, when)
    for slots, (first, last) in zip((64, 1024), protected, strict=True):
        positions = torch.arange(STEP)
        mask = policy.protection(slots, PROMPT, STEP).mask(
            positions, torch.ones_like(positions, dtype=torch.bool), PROMPT, STEP
        )
        assert mask.nonzero()[:, 0].tolist() == [*range(first), *range(STEP - last, STEP)]


@pytest.mark.parametrize(("slots", "delay"), [(256, 32), (512, 32), (767, 32), (768, 8), (1024, 8)])
def test_avokv_delay(slots: int, delay: int) -> None:
    """8 from a budget of 768 on, 32 below; between 512 and 768, where nothing is printed, the longer one."""
    assert make_policy("avokv_e").protection(slots, PROMPT, STEP).recent == delay
    assert make_policy("avokv_e", {"delay": 16}).protection(slots, PROMPT, STEP).recent == 16


def test_avokv_keeps_a_prompt_if_asked() -> None:
    assert make_policy("avokv_e", {"protect_prompt": True}).protection(512, PROMPT, STEP).prompt


@pytest.mark.parametrize(
    ("kind", "due"),
    [("streaming_llm", [0, 1, 127, 128, 256]), ("r_kv", [0, 128, 256]), ("snapkv", [0]), ("full", [])],
)
def test_when_it_is_due(kind: str, due: list[int]) -> None:
    schedule = make_policy(kind).schedule
    assert [count for count in (0, 1, 127, 128, 256) if schedule.due(count)] == due


def test_only_the_original_streaming_llm_moves_its_keys() -> None:
    kinds = policy_kinds.members()
    assert [kind.name for kind in kinds if kind.compact] == ["streaming_llm_rerotated"]


def test_what_is_frozen() -> None:
    """Scores that stored signals are enough for: no column of the cache, no attention that comes later."""
    assert {name for name in policy_kinds.names() if make_policy(name).frozen} == {
        *(
            "full",
            "random",
            "random_page",
            "oracle",
            "anti_oracle",
            "shuffled_oracle",
            "knorm",
            "kv_key",
            "kv_val",
        ),
        *("streaming_llm", "streaming_llm_36", "streaming_llm_rerotated"),
        *("epikv", "epikv_raw", "epikv_ema", "epikv_ema_slow", "epikv_rolling_mean", "epikv_band"),
    }
    assert make_policy("epikv_lag_kv", {"frozen": True}).frozen
