"""`cfkv doctor`: what a model is, and what cfkv can do with it on this machine."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from cfkv.config import Execution, ModelConfig
from cfkv.errors import CfkvError
from cfkv.manifest import library_versions
from cfkv.models.loading import LoadedModel, load_model
from cfkv.models.selfcheck import inventory, limits, self_check
from cfkv.models.tokens import THINK_END, THINK_START, decode, encode, replacement_id
from cfkv.workers import check_placement


def examine(config: ModelConfig, execution: Execution) -> bool:
    """Load the model, print what it is and check it; True if every check passed."""
    check_placement(execution)
    console = Console()
    loaded = load_model(config, execution)
    console.print(_facts(loaded))
    checks = self_check(loaded)
    table = Table("check", "result", "found", "what is compared", title="self-check")
    for check in checks:
        verdict = {True: "[green]ok[/green]", False: "[red]FAILED[/red]", None: "not possible"}[check.ok]
        table.add_row(check.name, verdict, "" if check.value is None else f"{check.value:.2g}", check.detail)
    console.print(table)
    for reason in limits(loaded):
        console.print(f"cannot: {reason}")
    return all(check.ok for check in checks)


def _facts(loaded: LoadedModel) -> Table:
    shape = loaded.shape
    table = Table(show_header=False, title=f"{loaded.name}")
    group = shape.num_heads // shape.num_kv_heads
    rows = {
        "revision": loaded.revision,
        "weights": loaded.weights,
        "runs as": f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}, {loaded.attn_implementation}",
        "layers": inventory(loaded),
        "attention": f"{shape.num_heads} query heads, {shape.num_kv_heads} KV heads ({group} per KV head), "
        f"head_dim {shape.head_dim}",
        "positions": f"{shape.max_positions:,}",
        "vocabulary": f"{shape.vocabulary:,}",
        "end tokens": ", ".join(_token(loaded, i) for i in sorted(loaded.end_ids))
        or "none: generation ends at its cap",
        "pad token": _pad(loaded),
        "replacement (auto)": _replacement(loaded),
        "think tokens": f"{THINK_START} = {encode(loaded.tokenizer, THINK_START)}, "
        f"{THINK_END} = {encode(loaded.tokenizer, THINK_END)}",
        "chat template": "yes" if getattr(loaded.tokenizer, "chat_template", None) else "no",
        "threads": str(torch.get_num_threads()),
        "versions": ", ".join(f"{name} {found}" for name, found in library_versions().items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _token(loaded: LoadedModel, token_id: int) -> str:
    return f"{decode(loaded.tokenizer, [token_id])!r} ({token_id})"


def _pad(loaded: LoadedModel) -> str:
    pad = loaded.tokenizer.pad_token_id
    if pad is None:
        return "none"
    note = ", which is an end token: occlusion must not use it" if pad in loaded.end_ids else ""
    return _token(loaded, pad) + note


def _replacement(loaded: LoadedModel) -> str:
    try:
        return _token(loaded, replacement_id(loaded.tokenizer, loaded.model, "auto"))
    except CfkvError as error:
        return f"none: {error}"
