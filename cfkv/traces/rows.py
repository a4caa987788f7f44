"""Reading the traces table, as the stages after it do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfkv import store
from cfkv.errors import CfkvError
from cfkv.models.loading import LoadedModel
from cfkv.schemas import TRACES
from cfkv.stage import Run


def trace_rows(run: Run, index: int) -> list[dict[str, Any]]:
    """All rows of one part of the traces, in their order; failed ones have `correct` None."""
    return store.read_part(store.part_path(run.path, TRACES, None, index), TRACES).to_pylist()


def items_in_part(traces: Mapping[str, Any], index: int) -> int:
    """Rows of part `index`, from the trace stage's record."""
    size = traces["identity"]["config"]["trace"]["part_size"]
    return max(0, min(size, traces["n_items"] - index * size))


def check_same_model(traces: dict[str, Any], loaded: LoadedModel) -> None:
    """Raise CfkvError if the traces were made by another model."""
    made = traces["identity"]["config"]["model"]
    if (made["model"], made["revision"]) != (loaded.identity["model"], loaded.revision):
        raise CfkvError(
            f"the traces were made by {made['model']} ({made['revision']}), not by {loaded.name} "
            f"({loaded.revision}); a label or signal is only defined for the model that wrote the trace"
        )
