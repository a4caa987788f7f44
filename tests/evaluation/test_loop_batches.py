"""Order, batch size and company change no answer and no keep set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from budgeted import distinct, read, small, task
from torch import Tensor

from cfkv.evaluation._loop import decode
from cfkv.evaluation._row import Outcome, Task
from cfkv.models.loading import LoadedModel
from cfkv.policies._base import Policy, Schedule, Seen, State, View, policy_kinds
from cfkv.policies._budget import Budget

NAMES = policy_kinds.names()
Tiny = Callable[[str, str], LoadedModel]
# Two sequences: prompt, where a policy that acts once reads to, length, slots, tokens generated at the end.
LONG, SHORT = (24, 52, 70, 44, 5), (20, 48, 60, 40, 3)


@functools.cache
def tasks(loaded: LoadedModel) -> list[tuple[str, Task]]:
    """Every policy on both sequences, with a name."""
    found = []
    for which, (prompt, context, length, slots, new) in enumerate((LONG, SHORT)):
        ids = distinct(loaded, length, seed=which)
        policies = [small(name) for name in NAMES]
        readings = {stop: read(loaded, policies, ids, stop, prompt=prompt) for stop in (prompt, context)}
        for index, policy in enumerate(policies):
            reading = readings[context if policy.schedule.kind == "once" else prompt]
            options: dict[str, Any] = {"max_new_tokens": new, "record": True}
            found.append(
                (f"{policy.name} {which}", task(reading, index, ids, Budget(slots=slots), **options))
            )
    return found


@functools.cache
def alone(loaded: LoadedModel) -> dict[str, Outcome]:
    return {name: decode([own], 1)[0] for name, own in tasks(loaded)}


def compare(found: Outcome, expected: Outcome, name: str) -> int:
    """1 where tokens differ at a tie, which ends the comparison."""
    assert (found.status, found.reason) == (expected.status, expected.reason) == ("ok", None), name
    if found.token_ids != expected.token_ids:
        assert expected.min_margin < 1e-4, name
        return 1
    assert found.keep_sets == expected.keep_sets, name
    assert found.min_margin == pytest.approx(expected.min_margin, abs=1e-4), name
    for field in ("finish_reason", "steps", "kept_sum", "kept_peak", "evictions", "evicted", "peak_bytes"):
        assert getattr(found, field) == getattr(expected, field), (name, field)
    return 0


@pytest.mark.parametrize(("batch_size", "order"), [(3, "shuffled"), (16, "reversed"), (200, "given")])
def test_order_and_company(batch_size: int, order: str, make_tiny: Tiny) -> None:
    loaded = make_tiny("qwen3", "sdpa")
    expected, chosen = alone(loaded), tasks(loaded)
    if order == "reversed":
        chosen = chosen[::-1]
    if order == "shuffled":
        places = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(batch_size))
        chosen = [chosen[place] for place in places.tolist()]
    outcomes = decode([own for _, own in chosen], batch_size)
    ties = sum(
        compare(found, expected[name], name) for (name, _), found in zip(chosen, outcomes, strict=True)
    )
    print(f"batches of {batch_size}, {order}: {ties} of {len(chosen)} rows differ at a tie")
    assert ties <= 1
    assert sum(outcome.evictions > 0 for outcome in outcomes) == len(outcomes) - 2  # all but the full cache


class Oldest(Policy):
    """Keeps the oldest tokens, so that the highest slots are freed; checks the attention that it is shown."""

    name: ClassVar[str] = "oldest"
    observes: ClassVar[tuple[str, ...]] = ("attention",)

    @property
    def schedule(self) -> Schedule:
        """Many slots at once."""
        return Schedule("every_m", 8)

    def observe(self, state: State, seen: Seen) -> None:
        """Each row is a softmax over what is in the cache."""
        rows = seen["attention"]
        hidden = ~seen.valid[..., None, :] | (seen.positions[..., None, :] > seen.tokens[:, None])
        assert bool((rows.masked_fill(~hidden, 0) == 0).all())
        torch.testing.assert_close(rows.sum(dim=-1), torch.ones(rows.shape[:-1]))

    def score(self, view: View) -> Tensor:
        return -view.positions.float()


@pytest.mark.parametrize("shorter", [27, 28, 36, 44])
def test_a_row_that_leaves_takes_the_slots_along_that_only_it_used(shorter: int, make_tiny: Tiny) -> None:
    loaded = make_tiny("llama", "sdpa")
    ids = distinct(loaded, 60)
    reading = read(loaded, [Oldest(), small("full")], ids, 20, prompt=20)
    own = task(reading, 0, ids, Budget(slots=24), record=True)
    other = task(reading, 1, ids, None, fed=ids[20:shorter], max_new_tokens=1)
    expected, found = decode([own], 1)[0], decode([own, other], 2)[0]
    assert expected.evictions == 5
    assert compare(found, expected, "oldest") == 0
