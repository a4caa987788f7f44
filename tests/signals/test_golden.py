"""Signals that are a published method's score, against arrays of independent implementations (golden/README.md).

StreamingLLM's score is of positions alone and R-KV's importance needs raw logits: no signal is theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d

from cfkv.models.observe import AttentionCall
from cfkv.signals._base import Observation, Signal, signal_kinds
from cfkv.signals._rows import RowPlans, attention_rows

GOLDEN = np.load(Path(__file__).parent / "golden" / "scores.npz")
LAYERS, TOKENS = range(2), 256
TOLERANCE = 1e-4


def tensor(name: str, layer: int) -> Tensor:
    return torch.from_numpy(GOLDEN[name][layer])


def read(signal: Signal, layer: int, block: int = 48) -> Tensor:
    """The signal's values [KV heads, tokens] of the stored queries, keys and values."""
    queries, keys, values = (tensor(name, layer) for name in ("queries", "keys", "values"))
    call = AttentionCall(
        layer=layer,
        module=nn.Identity(),
        queries=queries[None],
        keys=keys[None],
        values=values[None],
        mask=None,
        window=None,
        scaling=queries.shape[-1] ** -0.5,
    )
    shown: dict[str, Any] = {
        "length": TOKENS,
        "keys_GCD": keys,
        "values_GCD": values,
        "cached_keys_GND": keys,
        "cached_values_GND": values,
        "queries_HCD": queries,
    }
    state = signal.init()
    if "rows" not in signal.observes:
        state = signal.update(state, Observation(start=0, stop=TOKENS, **shown))
    else:
        for rows in attention_rows(call, RowPlans(block)):
            state = signal.update(state, Observation(start=rows.start, stop=rows.stop, rows=rows, **shown))
    return signal.read(state)


def check(found: Tensor, name: str, layer: int, columns: slice = slice(None)) -> None:
    expected = tensor(name, layer)[:, columns]
    largest = float((found - expected).abs().max())
    print(f"{name} layer {layer}: {largest:.2e}")
    assert largest < TOLERANCE


@pytest.mark.parametrize("layer", LAYERS)
class TestParity:
    """The same method gives the same scores."""

    def test_knorm(self, layer: int) -> None:
        """Its score is the negative."""
        check(-read(signal_kinds.get("key_norm")(), layer), "knorm", layer)

    def test_keydiff(self, layer: int) -> None:
        """Its score is the negative."""
        check(-read(signal_kinds.get("keydiff_cosine")(), layer), "keydiff", layer)

    def test_observed_attention(self, layer: int) -> None:
        """The mean per later query, not H2O's sum."""
        check(read(signal_kinds.get("attention_received_mean")(), layer), "observed_attention", layer)

    def test_tova(self, layer: int) -> None:
        """Mean over all heads; the last token is protected there by the maximum."""
        found = read(signal_kinds.get("attention_last")(), layer).mean(dim=0, keepdim=True)
        check(found[:, :-1].expand(2, -1), "tova", layer, slice(0, TOKENS - 1))

    def test_snapkv(self, layer: int) -> None:
        """The signal is before pooling; the window of 32 is filled there."""
        window = read(signal_kinds.get("attention_window")(), layer)[:, :-32]
        pooled = avg_pool1d(window, kernel_size=5, stride=1, padding=2)
        check(pooled, "snapkv_w32_k5", layer, slice(0, TOKENS - 32))

    def test_lagkv(self, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The signal is before ranking within the partition; sinks and the last partition are protected there."""
        signal = signal_kinds.get("lagkv")
        for name, value in (("sinks", 4), ("partition", 32)):
            monkeypatch.setattr(signal, name, value)
        found = read(signal(), layer)
        scored = ~found[0].isnan()
        assert scored.nonzero()[:, 0].tolist() == list(range(4, 4 + 6 * 32))
        parts = found[:, scored].unflatten(1, (-1, 32))
        ranks = parts.argsort(dim=-1).argsort(dim=-1) / 32
        check(ranks.flatten(1), "lagkv_sink4_lag32", layer, slice(4, 4 + 6 * 32))

    def test_rkv_redundancy(self, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """After its softmax, with the authors' exemption of column 0."""
        signal = signal_kinds.get("key_redundancy")
        clean = read(signal(), layer)
        monkeypatch.setattr(signal, "artefact", True)
        found = read(signal(), layer)
        check(found.softmax(dim=-1), "rkv_redundancy", layer)
        assert (found[:, 1:] - clean[:, 1:]).abs().max() < 1e-6  # the artefact touches the first key alone
        assert (found[:, 0] - clean[:, 0]).abs().max() > 1e-5
