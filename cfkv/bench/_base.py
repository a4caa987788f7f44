"""The contract of a bench, and what all of them share: timing, the machine, the table and the JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from cfkv import __version__
from cfkv.config import BenchConfig
from cfkv.models.loading import LoadedModel
from cfkv.registry import Registry

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One figure. Without a goal it is there to be read; `ok` is None then."""

    metric: str
    value: float
    unit: str
    goal: float | None = None
    better: Literal["higher", "lower"] | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


class Bench(ABC):
    """One question about speed or memory, answered by ratios. `model` is what it measures unless told otherwise."""

    name: ClassVar[str]
    model: ClassVar[str] = "smollm2"

    @abstractmethod
    def run(self, loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
        """Measure; takes minutes at most."""


benches: Registry[Bench] = Registry("bench", "cfkv.bench")


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call returns, and its wall-clock seconds, the device's work included."""
    _wait(device)
    start = time.perf_counter()
    result = call()
    _wait(device)
    return result, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(loaded: LoadedModel) -> dict[str, Any]:
    """What a figure depends on."""
    gpu = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else None
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cfkv": __version__,
        "model": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "attn_implementation": loaded.attn_implementation,
    }


def report(name: str, place: Mapping[str, Any], rows: Sequence[Measured], file: Path | None) -> None:
    """Print the table; write the JSON if asked to."""
    title = f"cfkv bench {name}: {place['model']}, {place['dtype']}, {place['gpu'] or place['cpu']}"
    table = Table("metric", "value", "unit", "goal", "", title=f"{title}, {place['threads']} threads")
    table.columns[1].justify = table.columns[3].justify = "right"
    for row in rows:
        sign = ">=" if row.better == "higher" else "<="
        goal = "" if row.goal is None else f"{sign} {row.goal:g}"
        verdict = "" if row.ok is None else "met" if row.ok else "missed"
        table.add_row(row.metric, f"{row.value:,.4g}", row.unit, goal, verdict)
    Console().print(table)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(as_json(name, place, rows), indent=2) + "\n", encoding="utf-8")


def as_json(name: str, place: Mapping[str, Any], rows: Sequence[Measured]) -> dict[str, Any]:
    """The content of the JSON file."""
    fields = ("metric", "value", "unit", "goal", "better", "ok")
    return {
        "bench": name,
        "machine": dict(place),
        "rows": [{field: getattr(row, field) for field in fields} for row in rows],
    }
