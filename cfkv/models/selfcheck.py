"""What a model can do here, measured: run by `cfkv doctor` and at the start of every stage that loads one.

The checks use the model itself on a few random tokens, so they hold for the kernel, dtype and library
versions at hand and not for an architecture in general.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.models import compat
from cfkv.models.loading import LoadedModel
from cfkv.models.observe import observing_attention, tapping_hidden

TOKENS, NEW_TOKENS = 24, 3
MAX_WINDOW = 1024  # longer sliding windows are not reached by the checks
# Largest logit difference that counts as equal: in half precisions a share of the largest logit, since their spacing
# grows with it. SmolLM2-135M on 27 tokens, largest logit 32.5: chunked against whole differs by 1/31 of it in bfloat16
# and 1/230 in float16, and bfloat16 differs from float32 by 1/12: a tighter bound refuses models that are sound.
TOLERANCE = 1e-3
SHARE = {torch.bfloat16: 1 / 16, torch.float16: 1 / 128}
KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class Check:
    """One check: `ok` is None where it could not be run; `value` is the largest logit difference."""

    name: str
    ok: bool | None
    value: float | None
    detail: str


def inventory(loaded: LoadedModel) -> str:
    """The layers by kind, e.g. `30 layers: 30 full_attention`."""
    kinds = Counter(loaded.shape.layer_types)
    text = f"{loaded.shape.num_layers} layers: " + ", ".join(
        f"{n} {kind}" for kind, n in sorted(kinds.items())
    )
    return text + (f", {loaded.shape.shared_layers} with shared KV" if loaded.shape.shared_layers else "")


def limits(loaded: LoadedModel) -> list[str]:
    """What cfkv cannot do with this model, each with the layers that are the reason."""
    found = []
    for kind in sorted(set(loaded.shape.layer_types) - KNOWN_LAYERS):
        layers = [i for i, own in enumerate(loaded.shape.layer_types) if own == kind]
        found.append(
            f"layers {number_ranges(layers)} are {kind}: they keep no key and value per token, so that replaying from "
            "a shared prefix, knockout, eviction and kv signals are undefined"
        )
    if loaded.shape.shared_layers:
        first = loaded.shape.num_layers - loaded.shape.shared_layers
        layers = list(range(first, loaded.shape.num_layers))
        found.append(f"layers {number_ranges(layers)} share their keys and values with earlier layers")
    return found


def number_ranges(numbers: list[int]) -> str:
    """`0-2, 4` for [0, 1, 2, 4]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


@torch.inference_mode()
def self_check(loaded: LoadedModel, *, caching: bool = True) -> list[Check]:
    """Run all checks; a model with layers that cfkv does not know gets None for each, with the reason.

    Without `caching`, only the check that needs no cache of keys and values is run, on any model.
    """
    reasons = limits(loaded)
    if reasons and caching:
        return [Check(name, None, None, reasons[0]) for name in CHECKS]
    rng = np.random.default_rng(0)
    window = getattr(loaded.model.config, "sliding_window", None) or 0
    tokens = TOKENS + (window if window <= MAX_WINDOW else 0)
    tokens = min(tokens, loaded.shape.max_positions - NEW_TOKENS)
    drawn = rng.integers(0, loaded.shape.vocabulary, size=tokens + NEW_TOKENS)
    ids = torch.tensor(drawn[None], device=loaded.device)
    return [check(loaded, ids, name) for name, check in CHECKS.items() if caching or check is _taps]


def _compare(loaded: LoadedModel, name: str, first: Tensor, second: Tensor, exact: str | None) -> Check:
    difference = float((first - second).abs().max())
    tolerance, told = TOLERANCE, f"{TOLERANCE:g}"
    if loaded.dtype in SHARE:
        share = SHARE[loaded.dtype]
        tolerance = share * float(first.abs().max())
        told = f"1/{1 / share:g} of the largest logit ({tolerance:.3g})"
    if exact:
        return Check(name, difference == 0, difference, exact)
    kind = str(loaded.dtype).removeprefix("torch.")
    return Check(
        name, difference <= tolerance, difference, f"largest logit difference, at most {told} in {kind}"
    )


def _taps(loaded: LoadedModel, ids: Tensor, name: str) -> Check:
    new_cache = partial(compat.own_cache, loaded.model) if limits(loaded) else compat.new_cache
    plain = compat.forward(loaded.model, ids, new_cache())
    seen: set[int] = set()
    with ExitStack() as taps:
        taps.enter_context(tapping_hidden(loaded.model, lambda layer, output: seen.add(layer)))
        if compat.observable(loaded.model) and not compat.attention_extras(loaded.model):
            taps.enter_context(observing_attention(loaded.model, lambda call: None))
        tapped = compat.forward(loaded.model, ids, new_cache())
    expected = set(range(-1, loaded.shape.num_layers))
    if seen != expected:
        return Check(name, False, None, f"taps fired for layers {sorted(seen)} of {sorted(expected)}")
    return _compare(loaded, name, plain, tapped, "bit-identical logits")


def _chunks(loaded: LoadedModel, ids: Tensor, name: str) -> Check:
    whole = compat.forward(loaded.model, ids, compat.new_cache())
    cache = compat.new_cache()
    pieces = [
        compat.forward(loaded.model, ids[:, start : start + 7], cache) for start in range(0, ids.shape[1], 7)
    ]
    return _compare(loaded, name, whole, torch.cat(pieces, dim=1), None)


def _masks(loaded: LoadedModel, ids: Tensor, name: str) -> Check:
    own = compat.forward(loaded.model, ids, compat.new_cache())
    positions = torch.arange(ids.shape[1], device=loaded.device)
    mask = compat.masks_from_positions(loaded.model, positions, positions)
    ours = compat.forward(loaded.model, ids, compat.new_cache(), attention_mask=mask)
    return _compare(loaded, name, own, ours, None)


def _evicted(loaded: LoadedModel, ids: Tensor, name: str) -> Check:
    held_tokens = ids.shape[1] - NEW_TOKENS
    cache = compat.new_cache()
    compat.forward(loaded.model, ids[:, :held_tokens], cache)
    positions = torch.arange(ids.shape[1], device=loaded.device)
    new = positions[held_tokens:]
    # Every second one of the newest dozen but one, so that sliding layers lose some of what they still see.
    hidden = torch.zeros_like(positions, dtype=torch.bool)
    hidden[held_tokens - 12 : held_tokens - 1 : 2] = True
    kept = positions[:held_tokens][~hidden[:held_tokens]]
    evicted = compat.map_cache(cache, slots=kept)
    results = []
    for held, keys, hide in ((cache, positions, hidden), (evicted, torch.cat([kept, new]), None)):
        mask = compat.masks_from_positions(loaded.model, new, keys, hide)
        results.append(
            compat.forward(loaded.model, ids[:, held_tokens:], held, positions=new[None], attention_mask=mask)
        )
    return _compare(loaded, name, results[0], results[1], None)


CHECKS: dict[str, Callable[[LoadedModel, Tensor, str], Check]] = {
    "logits with taps on = off": _taps,
    "chunked forward = whole forward": _chunks,
    "masks from positions = the model's own": _masks,
    "evicted forward = masked full forward": _evicted,
}


def description(loaded: LoadedModel, *, caching: bool = True) -> dict[str, Any]:
    """What the manifest stores about a model, after checking it (see `self_check` for `caching`).

    Raises
    ------
    CfkvError
        If a check fails or the model has layers that cfkv does not know.
    """
    checks = self_check(loaded, caching=caching)
    bad = [check for check in checks if not check.ok]
    if bad:
        lines = "\n  ".join(
            f"{check.name}: {check.detail}" + ("" if check.value is None else f" (found {check.value:g})")
            for check in bad
        )
        raise CfkvError(
            f"model {loaded.name!r} fails the self-check, so its labels would be wrong:\n  {lines}\n"
            f"`cfkv doctor --model {loaded.name}` shows more; another --attn-implementation may help"
        )
    return {
        "model": {
            "name": loaded.name,
            "revision": loaded.revision,
            "weights": loaded.weights,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "attn_implementation": loaded.attn_implementation,
            "device": str(loaded.device),
            "threads": torch.get_num_threads(),
            **{k: v for k, v in asdict(loaded.shape).items() if k != "layer_types"},
            "layers": inventory(loaded),
        },
        "self_check": [asdict(check) for check in checks],
    }
