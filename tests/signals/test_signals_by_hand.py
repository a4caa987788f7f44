"""Small cases whose values are known without a computer (methods.md 11)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cfkv.models.observe import AttentionCall
from cfkv.signals._base import Observation, Signal
from cfkv.signals._rows import RowPlans, attention_rows
from cfkv.signals.attention_received import AttentionReceived
from cfkv.signals.caote_error import output_errors
from cfkv.signals.capkv_leverage import leverages
from cfkv.signals.key_redundancy import KeyRedundancy
from cfkv.signals.last_refresh_age import LastRefreshAge
from cfkv.signals.longflow_score import LongflowScore
from cfkv.signals.recurrence_interval import RecurrenceInterval
from cfkv.signals.strong_read_lag import StrongReadLag


def redundancies(keys: Tensor) -> list[float]:
    count = keys.shape[0]
    observation = Observation(start=0, stop=count, length=count, cached_keys_GND=keys[None])
    signal = KeyRedundancy()
    return [float(value) for value in signal.read(signal.update(signal.init(), observation))[0]]


def test_three_identical_keys() -> None:
    """A < B < C: the newest duplicate is exempt in two rows, B in one, A in none."""
    keys = torch.eye(6)[[0, 0, 0, 1, 2]]
    first, second, third, *others = redundancies(keys)
    # Column A: rows B and C give 1 each, neither is their newest; B: row A gives 1, row C drops it; C: both drop it.
    assert [round(5 * value, 6) for value in (first, second, third)] == [2.0, 1.0, 0.0]
    assert others == [0.0, 0.0]


def test_two_identical_keys_tie() -> None:
    first, second, *_ = redundancies(torch.eye(6)[[0, 0, 1, 2]])
    assert first == second == 0.0


def test_leverages_are_shares_of_a_dimension() -> None:
    """In [0, 1), summing to at most the head dimension; one value direction alone has w / (1 + w)."""
    values = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    found = leverages(torch.full((2, 40), 3.0), values)
    assert found.min() >= 0
    assert found.max() < 1
    assert found.sum(dim=-1).max() <= 8
    alone = leverages(torch.log(torch.tensor([[3.0]])), torch.eye(4)[None, :1])
    assert torch.allclose(alone, torch.tensor([[0.75]]))


def test_caote_is_the_change_of_the_output() -> None:
    """Two values, 0 and 10, with weights .8 and .2: without the first the output moves from 2 to 10."""
    errors = output_errors(torch.tensor([[[0.8, 0.2]]]), torch.tensor([[[0.0], [10.0]]]))
    assert torch.allclose(errors, torch.tensor([[8.0, 2.0]]))


def folded(signal: Signal, weights: Tensor, values: Tensor | None = None, block: int = 2) -> list[float]:
    """The signal's values for one head whose attention rows are `weights` [N, N] (lower triangle, rows sum to 1)."""
    count = len(weights)
    # Queries that are rows of log-weights and keys that are unit vectors give these weights exactly.
    scores = weights.clamp(min=1e-12).log()
    call = AttentionCall(
        layer=0,
        module=nn.Identity(),
        queries=scores[None, None],
        keys=torch.eye(count)[None, None],
        values=torch.zeros(1, 1, count, 1),
        mask=None,
        window=None,
        scaling=1.0,
    )
    state = signal.init()
    for rows in attention_rows(call, RowPlans(block)):
        observation = Observation(
            start=rows.start, stop=rows.stop, length=count, rows=rows, cached_values_GND=values
        )
        state = signal.update(state, observation)
    return [round(float(value), 5) for value in signal.read(state)[0]]


# Key 0 is read by queries 1 and 4, key 1 by none but itself, key 2 by query 3.
WEIGHTS = torch.tensor(
    [
        [1.00, 0.00, 0.00, 0.00, 0.00],
        [0.60, 0.40, 0.00, 0.00, 0.00],
        [0.10, 0.10, 0.80, 0.00, 0.00],
        [0.10, 0.10, 0.70, 0.10, 0.00],
        [0.90, 0.02, 0.02, 0.03, 0.03],
    ]
)


def test_reading_times() -> None:
    """Uniform shares are 1, 1/2, 1/3, 1/4, 1/5; a key counts as read when it is written."""
    assert folded(RecurrenceInterval(), WEIGHTS) == [3.0, 0.0, 1.0, 0.0, 0.0]
    assert folded(LastRefreshAge(), WEIGHTS) == [0.0, 3.0, 1.0, 1.0, 0.0]
    assert folded(AttentionReceived(), WEIGHTS) == [2.7, 0.62, 1.52, 0.13, 0.03]


def test_received_mass_is_the_number_of_rows() -> None:
    """H2O: the mass accumulated before any eviction."""
    assert abs(sum(folded(AttentionReceived(), WEIGHTS)) - 5) < 1e-4


def test_first_strong_read_is_censored() -> None:
    """60 tokens: token 0 is read strongly by query 3; others never; those whose horizon is cut are unknown."""
    weights = torch.tril(torch.ones(60, 60)) / torch.arange(1, 61)[:, None]
    weights[3, :4], weights[50, :51] = torch.tensor([0.97, 0.01, 0.01, 0.01]), 0.2 / 50
    weights[50, 40] = 0.8
    found = folded(StrongReadLag(), weights, block=7)
    # 5 times the uniform share of query 3 is 1.25: nothing is strong among four keys.
    assert found[0] == 33.0
    assert found[40] == 10.0
    assert found[27] == 33.0
    assert all(value != value for value in found[28:40] + found[41:])  # NaN


def test_longflow_by_hand() -> None:
    """Last row times the mean absolute value."""
    values = torch.tensor([[[1.0], [2.0], [-3.0], [4.0], [5.0]]])
    assert folded(LongflowScore(), WEIGHTS, values) == [0.9, 0.04, 0.06, 0.12, 0.15]
