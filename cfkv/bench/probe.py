"""Streaming probes: speed and memory against a bare forward, and against holding everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from cfkv.bench._base import Bench, Measured, benches
from cfkv.bench._peak import peak_bytes
from cfkv.config import BenchConfig
from cfkv.models.loading import LoadedModel
from cfkv.signals._base import signal_kinds
from cfkv.signals._cost import agreement_costs, bare_forward, probe_costs, random_ids
from cfkv.signals._probe import probe

CHEAP = ("hidden", "kv", "logits")
ALL = (*CHEAP, "attention")
PAIRWISE = ("kv_pairwise",)
CAP = 4 * 2**30
DENSE_TOKENS = (256, 512)


@benches.register
class Probe(Bench):
    """What do signals cost over the forward that they ride on?"""

    model: ClassVar[str] = "smollm2"

    def run(self, loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
        """2,048 tokens unless told otherwise; memory at half, once, twice and four times that."""
        tokens, chunk = config.tokens, config.chunk_size
        groups = (CHEAP, ALL, PAIRWISE)
        bare, cheap, everything, pairwise = probe_costs(loaded, groups, tokens=tokens, chunk_size=chunk)
        prefill, one_pass, second = agreement_costs(loaded, tokens=tokens, chunk_size=chunk)
        rows = [
            Measured(
                "hidden, kv, logits: speed / bare", bare.seconds / cheap.seconds, "ratio", 0.85, "higher"
            ),
            Measured(
                "with attention: speed / bare", bare.seconds / everything.seconds, "ratio", 0.3, "higher"
            ),
            Measured("kv_pairwise alone: speed / bare", bare.seconds / pairwise.seconds, "ratio"),
            Measured("bare forward with all logits", tokens / bare.seconds, "tokens/s"),
            Measured("hidden, kv, logits", tokens / cheap.seconds, "tokens/s"),
            Measured("with attention", tokens / everything.seconds, "tokens/s"),
            Measured(
                "agreement in the prefill: added / prefill",
                one_pass.seconds / prefill.seconds - 1,
                "share",
                0.1,
                "lower",
            ),
            Measured(
                "agreement after the prefill / prefill",
                second.seconds / prefill.seconds,
                "share",
                0.1,
                "lower",
            ),
        ]
        return rows + memory(loaded, config)


def memory(loaded: LoadedModel, config: BenchConfig) -> list[Measured]:
    """Peaks of tensors, weights included; the slope; and the context that the dense way reaches under a cap."""
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    chunk = config.chunk_size

    def bare(tokens: int) -> int:
        return peak_bytes(lambda: bare_forward(loaded, random_ids(loaded, tokens), chunk), loaded.device)

    def probed(tokens: int, groups: Sequence[str]) -> int:
        signals = [signal() for signal in signal_kinds.members() if signal.group in groups]
        call: Callable[[], Any] = lambda: probe(loaded, random_ids(loaded, tokens), signals, chunk_size=chunk)  # noqa: E731
        return peak_bytes(call, loaded.device)

    tokens = config.tokens
    plain = bare(tokens)
    lengths = [tokens // 2, tokens, 2 * tokens, 4 * tokens]
    peaks = {length: probed(length, ALL) for length in lengths}
    rows = [
        Measured(
            f"peak memory of {name} / bare, weights included",
            (weights + peak) / (weights + plain),
            "ratio",
            1.15,
            "lower",
        )
        for name, peak in (("hidden, kv, logits", probed(tokens, CHEAP)), ("with attention", peaks[tokens]))
    ]
    rows.append(Measured("the same beyond the weights, with attention", peaks[tokens] / plain, "ratio"))
    for shorter, longer in zip(lengths[:-1], lengths[1:], strict=True):
        slope = (peaks[longer] - peaks[shorter]) / (longer - shorter) / 2**10
        rows.append(
            Measured(f"with attention, memory per token from {shorter:,} to {longer:,}", slope, "KiB")
        )
    slope = (peaks[lengths[-1]] - peaks[lengths[0]]) / (lengths[-1] - lengths[0])
    reach = (CAP - weights - peaks[lengths[-1]]) / slope + lengths[-1]
    dense = dense_reach(loaded, weights)
    rows += [
        Measured("tokens within 4 GiB, all outputs held", dense, "tokens, from a fit"),
        Measured("tokens within 4 GiB, with attention streamed", reach, "tokens, from the slope"),
        Measured("context, streamed / held", reach / dense, "x", 16, "higher"),
    ]
    return rows


def dense_reach(loaded: LoadedModel, weights: int) -> float:
    """Tokens at which attention maps and hidden states of all layers fill the cap: a n^2 + b n from two lengths."""
    before = loaded.model.config._attn_implementation  # type: ignore[union-attr]
    loaded.model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        peaks = [peak_bytes(lambda n=n: _dense(loaded, n), loaded.device) for n in DENSE_TOKENS]  # type: ignore[misc]
    finally:
        loaded.model.set_attn_implementation(before)  # type: ignore[operator]
    (first, second), (low, high) = DENSE_TOKENS, peaks
    square = (high / second - low / first) / (second - first)
    linear = low / first - square * first
    return (-linear + (linear**2 + 4 * square * (CAP - weights)) ** 0.5) / (2 * square)


@torch.inference_mode()
def _dense(loaded: LoadedModel, tokens: int) -> Any:
    ids = torch.tensor([random_ids(loaded, tokens)], device=loaded.device)
    return loaded.model(
        ids, output_attentions=True, output_hidden_states=True, use_cache=True, logits_to_keep=1
    )
