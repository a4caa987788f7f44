"""The decode loop: many sequences, policies and budgets in one batch, one token of each per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from cfkv.errors import ItemError
from cfkv.evaluation._row import Outcome, Row, Task, reads
from cfkv.models.budget_cache import BudgetCache

# Receives the index of a task, the position of the token that was fed, and the logits after it [vocabulary].
Watch = Callable[[int, int, Tensor], None]


@torch.inference_mode()
def decode(tasks: Sequence[Task], batch_size: int, watch: Watch | None = None) -> list[Outcome]:
    """Decode all tasks of one model; outcomes in their order.

    Tasks that need about as many slots share a batch; neither the order of the tasks nor their company changes an
    outcome beyond rounding. `watch` is called after each step of each task.
    """
    rows = {index: Row(task) for index, task in enumerate(tasks)}
    outcomes = {index: row.outcome for index, row in rows.items()}
    ready = [index for index, row in rows.items() if _prepared(row)]
    order = sorted(ready, key=lambda index: (rows[index].slots, index))
    for start in range(0, len(order), batch_size):
        _Batch({index: rows[index] for index in order[start : start + batch_size]}, watch).run()
    return [outcomes[index] for index in range(len(tasks))]


def _prepared(row: Row) -> bool:
    with _Timer(row.outcome):
        try:
            row.prepare()
        except ItemError as error:
            _fail(row, error)
    return not row.ended


def _fail(row: Row, error: ItemError) -> None:
    row.ended = True
    row.outcome.status, row.outcome.reason = error.status, error.reason


class _Batch:
    """Rows of one cache. A row that ends leaves once half of the batch has ended."""

    def __init__(self, numbered: Mapping[int, Row], watch: Watch | None) -> None:
        rows = list(numbered.values())
        loaded = rows[0].task.reading.loaded
        self.watch, self.numbers = watch, {id(row): index for index, row in numbered.items()}
        policies = [row.policy for row in rows]
        rotating = any(row.positions == "compact" for row in rows)
        self.all, self.device = rows, loaded.device
        self.cache = BudgetCache(
            loaded, len(rows), max(row.slots for row in rows), reads(policies, rotating=rotating)
        )
        self.rows: list[Row] = []
        self.active: set[int] = set()

    def run(self) -> None:
        """Decode until every row has ended."""
        self._load()
        with self.cache.attached():
            while self.active:
                self._step()
                if 2 * len(self.active) <= len(self.rows):
                    self._leave()

    def _load(self) -> None:
        for place, row in enumerate(self.all):
            self.rows.append(row)
            with _Timer(row.outcome):
                row.load(self.cache, place)
            logits = row.task.reading.logits
            if row.take(logits, logits.topk(2).values):
                self.active.add(place)
            else:
                self._close(row)
        if self.active and len(self.active) < len(self.rows):
            self._leave()

    def _step(self) -> None:
        began = time.perf_counter()
        rows = self.rows
        slots = torch.stack([row.next_slots() for row in rows], dim=1)
        columns = [(row.pending, row.step, row.rotary_position()) for row in rows]
        tokens, positions, rotary = torch.tensor(columns, device=self.device).unbind(dim=1)
        logits = self.cache.step(tokens, slots, positions, rotary)
        choosing = any(not rows[place].feeding for place in self.active)
        top = logits.topk(2, dim=-1).values if choosing else None
        share = (time.perf_counter() - began) / len(self.active)
        for place in sorted(self.active):
            row = rows[place]
            row.outcome.seconds += share
            if self.watch is not None:
                self.watch(self.numbers[id(row)], row.step, logits[place])
            with _Timer(row.outcome):
                try:
                    row.after(self.cache)
                    more = row.take(logits[place], None if top is None else top[place])
                except ItemError as error:
                    _fail(row, error)
                    more = False
            if not more:
                self.active.discard(place)
                self._close(row)

    def _close(self, row: Row) -> None:
        row.ended = True
        if row.outcome.status == "ok":
            try:
                row.finish(self.cache.bytes_per_slot())
            except ItemError as error:
                _fail(row, error)

    def _leave(self) -> None:
        """Drop the rows that ended from the cache."""
        staying = sorted(self.active)
        if not staying:
            return
        self.cache.keep_rows(staying)
        self.rows = [self.rows[place] for place in staying]
        for place, row in enumerate(self.rows):
            row.place = place
        self.active = set(range(len(self.rows)))


class _Timer:
    """Adds the seconds spent inside to an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.began = outcome, 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.outcome.seconds += time.perf_counter() - self.began
