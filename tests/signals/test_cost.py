"""The measuring functions measure what they say; no figure is asserted here."""

from __future__ import annotations

import itertools

from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.signals._cost import agreement_costs, bare_forward, probe_costs


def test_costs_take_turns_and_keep_the_best(llama: LoadedModel) -> None:
    """With a clock that ticks once per reading, every turn takes one tick."""
    ticks = itertools.count()
    costs = probe_costs(
        llama,
        [["hidden"], ["hidden", "kv", "logits"]],
        tokens=50,
        repeats=2,
        clock=lambda: float(next(ticks)),
    )
    assert [(cost.name, cost.seconds) for cost in costs] == [
        ("bare", 1.0),
        ("hidden", 1.0),
        ("hidden+kv+logits", 1.0),
    ]
    assert next(ticks) == 12
    assert all(cost.peak_bytes is None or cost.peak_bytes > 0 for cost in costs)
    assert [cost.name for cost in agreement_costs(llama, tokens=50, repeats=1)] == [
        "prefill",
        "one pass",
        "second pass",
    ]


def test_the_bare_forward_fills_the_cache(llama: LoadedModel) -> None:
    assert compat.cache_length(bare_forward(llama, list(range(50)), 16)) == 50
