"""EpiKV's scores of birth against loops over the series, on models of 32 layers and of others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from dense_cache import Array, array
from policy_formulas import minmax, rolling_mean, rolling_z
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.policies._base import Policy, Seen, State, View, make_policy

PROMPT, TOKENS = 6, 206


def observed(policy: Policy, block: int = 50, **columns: Tensor) -> State:
    """The state after `TOKENS` tokens in blocks; the column `attention` is cut to what each block may see."""
    slots = torch.arange(TOKENS)[None, None]
    state = policy.init((1, 1), TOKENS)
    for start in range(0, TOKENS, block):
        new = torch.arange(start, min(start + block, TOKENS))
        shown = {
            name: columns[name].narrow(2 if name == "attention" else -1, start, len(new)) for name in columns
        }
        policy.observe(
            state,
            Seen(
                tokens=new,
                slots=slots[..., new],
                positions=slots,
                valid=slots <= int(new[-1]),
                prompt_len=PROMPT,
                columns=shown,
            ),
        )
    return state


def series(layers: int, seed: int = 0) -> Tensor:
    """Differences that grow with depth, [layers, TOKENS]; the prompt's are large, to be noticed if they are used."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(layers, TOKENS, generator=generator) + torch.arange(1, layers + 1)[:, None] / 8
    drawn[:, :PROMPT] += 1000
    return drawn


def ema(new: float) -> Callable[[Array], Array]:
    def smooth(values: Array) -> Array:
        found = [values[0]]
        for value in values[1:]:
            found.append(new * value + (1 - new) * found[-1])
        return np.array(found)

    return smooth


SMOOTHINGS: dict[str, Callable[[Array], Array]] = {
    "epikv": rolling_z,
    "epikv_raw": lambda values: values,
    "epikv_ema": ema(0.9),
    "epikv_ema_slow": ema(0.1),
    "epikv_rolling_mean": rolling_mean,
}


def births(policy: Policy, **columns: Tensor) -> Array:
    """Scores of all tokens; those of the prompt are 0."""
    found = array(observed(policy, **columns).columns["score"])[0, 0]
    assert (found[:PROMPT] == 0).all()
    return found[PROMPT:]


def same(found: Array, expected: Array) -> None:
    print(f"largest difference {np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layers", "early", "late"), [(32, 10, 21), (36, 11, 24), (28, 9, 18)])
@pytest.mark.parametrize("name", sorted(SMOOTHINGS))
def test_two_layers(name: str, layers: int, early: int, late: int) -> None:
    """round(10 * 36 / 32) = round(11.25), round(21 * 36 / 32) = round(23.6); 8.75 and 18.4 of 28."""
    differences = series(layers)
    generated, smooth = array(differences)[:, PROMPT:], SMOOTHINGS[name]
    same(
        births(make_policy(name), hidden_diff=differences), smooth(generated[early]) - smooth(generated[late])
    )


@pytest.mark.parametrize(
    ("layers", "early", "late"), [(32, range(7, 14), range(18, 26)), (36, range(8, 16), range(20, 29))]
)
def test_bands(layers: int, early: range, late: range) -> None:
    """Averages first, then z: 1.29 z_A - z_B; 7.9..14.6 and 20.25..28.1 of 36 layers."""
    differences = series(layers)
    generated = array(differences)[:, PROMPT:]
    first, second = (rolling_z(generated[list(band)].mean(axis=0)) for band in (early, late))
    same(births(make_policy("epikv_band"), hidden_diff=differences), 1.29 * first - second)


def test_layers_that_are_asked_for() -> None:
    differences = series(32)
    generated = array(differences)[:, PROMPT:]
    policy = make_policy("epikv_raw", {"early": (0, 3), "late": (31,)})
    same(births(policy, hidden_diff=differences), (generated[0] + generated[3]) / 2 - generated[31])
    with pytest.raises(CfkvError, match=r"layers \[32\] of a model with 32; legal: 0 to 31"):
        births(make_policy("epikv", {"early": (32,)}), hidden_diff=differences)


@pytest.mark.parametrize(("name", "column"), [("kv_key", "key_variance"), ("kv_val", "value_variance")])
@pytest.mark.parametrize("sign", [1, -1])
def test_variances(name: str, column: str, sign: int) -> None:
    """Mean over 3 layers and 2 KV heads, then over the trailing 64 tokens."""
    drawn = series(6).unflatten(0, (3, 2))
    expected = sign * rolling_mean(array(drawn)[..., PROMPT:].mean(axis=(0, 1)))
    same(births(make_policy(name, {"sign": sign}), **{column: drawn}), expected)


def test_a_constant_has_no_z() -> None:
    level = torch.full((32, TOKENS), 3.7)
    assert np.abs(births(make_policy("epikv"), hidden_diff=level)).max() < 1e-6


def test_a_constant_shift_leaves_z() -> None:
    differences = series(32)
    shifted = differences.clone()
    shifted[10] += 5
    first, second = (births(make_policy("epikv"), hidden_diff=each) for each in (differences, shifted))
    assert np.abs(first - second).max() < 1e-4
    moved = births(make_policy("epikv_rolling_mean"), hidden_diff=shifted)
    assert np.allclose(
        moved - births(make_policy("epikv_rolling_mean"), hidden_diff=differences), 5, atol=1e-4
    )


def test_a_trend_moves_z_far_less_than_the_rolling_mean() -> None:
    """Layer 10 drifts by as much as its noise over 64 tokens; scaled by their own spread, ranks by z hardly move."""
    differences = series(32)
    drifting = differences.clone()
    drifting[10] += torch.arange(TOKENS) / 64
    moves = []
    for name in ("epikv", "epikv_rolling_mean"):
        before, after = (births(make_policy(name), hidden_diff=each)[64:] for each in (differences, drifting))
        moves.append(np.abs(after - before).mean() / before.std())
    print(f"moved by {moves} standard deviations")
    assert moves[0] < moves[1] / 10


def test_attention_times_hidden() -> None:
    """minmax(mass) + minmax(z_10) over the candidates: neither prompt nor window."""
    policy = make_policy("epikv_attention")
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(32, 2, TOKENS, TOKENS, generator=generator)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    rows = logits.masked_fill(later, -torch.inf).softmax(dim=-1)
    differences = series(32)
    state = observed(policy, attention=rows, hidden_diff=differences)
    positions = torch.arange(TOKENS)[None, None]
    protected = policy.protection(64, PROMPT, TOKENS).mask(positions, positions >= 0, PROMPT, TOKENS)
    view = View(
        step=TOKENS,
        prompt_len=PROMPT,
        positions=positions,
        valid=positions >= 0,
        protected=protected,
        state=state.columns,
    )
    found = array(policy.score(view))[0, 0, PROMPT : TOKENS - 16]
    mass = sum(array(rows)[layer, head].sum(axis=0) for layer in range(32) for head in range(2)) / 64
    moved = rolling_z(array(differences)[10, PROMPT:])[: TOKENS - 16 - PROMPT]
    mass = mass[PROMPT : TOKENS - 16]
    same(found, minmax(mass) + minmax(moved))
