"""Scores of policies against arrays of independent implementations (tests/signals/golden/README.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfkv.policies._base import Policy, Seen, View, make_policy
from cfkv.policies.pyramidkv import pyramid

GOLDEN = np.load(Path(__file__).parents[1] / "signals" / "golden" / "scores.npz")
TOKENS, TOLERANCE = 256, 1e-4
SCALING = 16**-0.5


def tensor(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


def attention() -> Tensor:
    """[layers, heads, queries, keys], by the textbook."""
    keys = tensor("keys").repeat_interleave(2, dim=1)
    logits = tensor("queries") @ keys.transpose(-1, -2) * SCALING
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(dim=-1)


def score(policy: Policy, **observed: Tensor) -> Tensor:
    """The policy's score of all 256 tokens as a prompt, one slot each in order."""
    layers = 1 if policy.mask_scope == "global" else 2
    heads = 2 if policy.mask_scope == "kv_head" else 1
    positions = torch.arange(TOKENS).expand(layers, heads, TOKENS)
    valid = torch.ones_like(positions, dtype=torch.bool)
    state = policy.init((layers, heads), TOKENS)
    if policy.observes:
        tokens = torch.arange(TOKENS)
        policy.observe(
            state,
            Seen(
                tokens=tokens,
                slots=positions,
                positions=positions,
                valid=valid,
                prompt_len=TOKENS,
                columns=observed,
            ),
        )
    columns: dict[str, Any] = {
        "keys": tensor("keys"),
        "values": tensor("values"),
        "queries": tensor("queries")[:, :, -policy.window :],
        "attention": attention()[:, :, -policy.window :],
    }
    view = View(
        step=TOKENS,
        prompt_len=TOKENS,
        positions=positions,
        valid=valid,
        protected=torch.zeros_like(valid),
        columns={name: columns[name] for name in policy.needs},
        state=state.columns,
        scaling=SCALING,
    )
    return policy.score(view)


def check(found: Tensor, name: str, columns: slice = slice(None)) -> None:
    largest = float((found[..., columns] - tensor(name)[..., columns]).abs().max())
    print(f"{name}: {largest:.1e}")
    assert largest < TOLERANCE


def test_snapkv() -> None:
    """kvpress pools by an average over 5; the window is filled there."""
    check(score(make_policy("snapkv")), "snapkv_w32_k5", slice(0, TOKENS - 32))


def test_keydiff() -> None:
    check(score(make_policy("keydiff")), "keydiff")


def test_knorm() -> None:
    check(score(make_policy("knorm"), key_norm=tensor("keys").norm(dim=-1)), "knorm")


def test_tova() -> None:
    """The last token is protected there."""
    check(score(make_policy("tova")).expand(2, 2, -1), "tova", slice(0, TOKENS - 1))


def test_h2o_is_the_sum_that_observed_attention_divides() -> None:
    """Observed attention is the mean over the TOKENS - j queries that may see token j and the two query heads of a
    KV head, H2O's score their sum."""
    queries = 2 * (TOKENS - torch.arange(TOKENS))
    check(score(make_policy("h2o"), attention=attention()) / queries, "observed_attention")


def test_lagkv_rank() -> None:
    """kvpress's 4 sinks and partitions of 32; what it keeps anyway has 1."""
    check(score(make_policy("lagkv_rank", {"lag": 32})), "lagkv_sink4_lag32")


def test_pyramidkv_budgets() -> None:
    """kvpress, at half of 256 tokens, window 32 and beta 20 in 4 layers, keeps 224, 160, 96 and 32 tokens."""
    assert pyramid(room=128, free=224, window=32, layers=4, beta=20) == [224, 160, 96, 32]


def test_r_kv() -> None:
    """With the authors' lambda and their exemption of the first column; the window of 8 has no score there."""
    policy = make_policy("r_kv", {"weight": 0.07, "first_column": True})
    check(score(policy)[..., : TOKENS - 8], "rkv_score")


def test_streaming_llm_keeps_what_it_keeps() -> None:
    """At half the cache kvpress keeps the 4 sinks and the newest 124."""
    expected = tensor("streamingllm_sink4")[0, 0].topk(128).indices.sort().values.tolist()
    assert expected == [*range(4), *range(TOKENS - 124, TOKENS)]
    policy = make_policy("streaming_llm")
    found = score(policy)[0, 0]
    protection = policy.protection(128, TOKENS, TOKENS)
    mask = protection.mask(torch.arange(TOKENS), torch.ones(TOKENS, dtype=torch.bool), TOKENS, TOKENS)
    found = found.masked_fill(mask, torch.inf)
    newest_first = sorted(range(TOKENS), key=lambda j: (found[j].item(), j), reverse=True)
    assert sorted(newest_first[:128]) == expected
