"""`cfkv trace`: problems in, rows of the traces table out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from cfkv.answers import matcher
from cfkv.config import Config, Execution, Recipe, TraceConfig
from cfkv.models.loading import LoadedModel
from cfkv.models.sources import NAMED
from cfkv.schemas import TRACES
from cfkv.stage import Output, Rows, Run, Stage, StageResult
from cfkv.traces.items import trace_items
from cfkv.traces.write import TraceWriter
from cfkv.workers import Workers

STAGE_VERSION = 1


def trace_identity(config: TraceConfig) -> dict[str, Any]:
    """The configuration as the fingerprint sees it: a file counts by its content, not by its place."""
    data = config.model_dump(mode="json", exclude={"path"})
    data["file"] = None if config.path is None else _content_hash(config.path)
    return data


def _content_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


C = TypeVar("C", bound=Config)


def absolute(config: C, field: str, names: Collection[str] = ()) -> C:
    """The configuration with a local path spelt in full, so that later commands find it from anywhere.

    One of `names` is no path, even where a folder is called so: that of the run, say.
    """
    value = getattr(config, field)
    if value is None or value in names or not Path(value).expanduser().exists():
        return config
    found = Path(value).expanduser().resolve()
    return config.model_copy(update={field: found if isinstance(value, Path) else str(found)})


def run_trace(
    run: Run,
    recipe: Recipe,
    execution: Execution,
    crew: Workers,
    load: Callable[[], LoadedModel],
    describe: Callable[..., dict[str, Any]],
) -> StageResult:
    """Make the traces of `recipe.trace` that this process owns and that are not there yet.

    `load` gives the model; `describe` what the manifest stores about it.
    """
    config = recipe.trace
    items = trace_items(config)
    size = config.part_size
    loaded = load()
    stage = Stage(
        name="trace",
        config={"trace": trace_identity(config), "model": loaded.identity},
        outputs=(Output(TRACES),),
        n_parts=-(-len(items) // size),
        n_items=len(items),
        version=STAGE_VERSION,
    )
    # An import only scores its tokens in one forward, which a model without keys and values can do as well.
    extra = describe(loaded, caching=config.mode != "import")
    mark = run.open_stage(stage, overwrite=execution.overwrite, extra=extra)
    run.manifest.record_config("model", absolute(recipe.model, "model", NAMED))
    run.manifest.record_config("trace", absolute(config, "path"))
    writer = TraceWriter(loaded, config, execution, matcher(config.answer_match))

    def process(index: int, advance: Callable[[int], None]) -> list[Rows]:
        return [writer.rows(items[index * size : (index + 1) * size], advance)]

    return run.execute(
        stage,
        process,
        crew,
        mark=mark,
        items_of_part=lambda index: len(items[index * size : (index + 1) * size]),
    )
