"""Models whose attention is more than a masked softmax, or no attention at all: refused by name, the rest works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from cfkv.config import ProbeConfig
from cfkv.errors import CfkvError
from cfkv.models import compat
from cfkv.models.decode import teacher_forced_logprobs
from cfkv.models.loading import LoadedModel
from cfkv.models.selfcheck import description
from cfkv.signals._base import Signal, signal_kinds
from cfkv.signals._probe import needs_cache, probe
from cfkv.signals._stage import groups, refuse_attention

Wrap = Callable[[str, nn.Module, Any], LoadedModel]
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def make(wrap_model: Wrap, tokenizer: Any, kind: str, **own: Any) -> LoadedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **own})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=own.get("kernel", "eager"))
    return wrap_model(f"tiny-{kind}", model.eval(), tokenizer)


def members(*names: str) -> list[Signal]:
    return [signal() for name in names for signal in groups()[name]]


@pytest.fixture
def gemma2(wrap_model: Wrap, word_tokenizer: Any) -> LoadedModel:
    """Soft-capped logits on every layer."""
    return make(wrap_model, word_tokenizer, "gemma2", sliding_window=8)


@pytest.fixture
def gpt_oss(wrap_model: Wrap, word_tokenizer: Any) -> LoadedModel:
    """A learned sink in every head."""
    return make(
        wrap_model, word_tokenizer, "gpt_oss", num_local_experts=2, num_experts_per_tok=1, sliding_window=8
    )


@pytest.fixture
def lfm2(wrap_model: Wrap, word_tokenizer: Any) -> LoadedModel:
    """Convolutions on layers 0 and 2, attention on layer 1."""
    return make(
        wrap_model, word_tokenizer, "lfm2", layer_types=["conv", "full_attention", "conv"], block_ff_dim=64
    )


@pytest.mark.parametrize(
    ("family", "what"),
    [("gemma2", "soft-capped logits"), ("gpt_oss", "attention sinks with weights of their own")],
)
def test_attention_beyond_a_softmax_is_refused(
    family: str, what: str, request: pytest.FixtureRequest
) -> None:
    """By the stage before anything runs, and by the pass; keys and hidden states are read all the same."""
    loaded, ids = request.getfixturevalue(family), list(range(20))
    with pytest.raises(CfkvError, match=rf"tiny-{family}: attention of layers 0-2 has {what}"):
        refuse_attention(loaded)
    with pytest.raises(CfkvError, match=f"attention of layer 0 has {what}"):
        probe(loaded, ids, members("attention"), chunk_size=8)
    assert loaded.model.config._attn_implementation == "eager"
    values = probe(loaded, ids, members("hidden", "kv", "logits"), chunk_size=8)
    assert {layer for name, layer in values if name == "key_norm"} == {0, 1, 2}


def test_plain_models_are_not_refused(tiny: LoadedModel) -> None:
    assert compat.attention_extras(tiny.model) == {}
    refuse_attention(tiny)


def test_layers_without_keys_are_refused_and_hidden_signals_work(lfm2: LoadedModel) -> None:
    """Layers named; the values are those of the model's own forward."""
    hidden = members("hidden", "logits", "position")
    assert not needs_cache(hidden)
    assert all(needs_cache(members(name)) for name in ("kv", "kv_prerotary", "attention"))
    with pytest.raises(CfkvError, match="layers 0, 2 are conv: they keep no key and value per token"):
        description(lfm2)
    assert [check["ok"] for check in description(lfm2, caching=False)["self_check"]] == [True]
    ids = torch.randint(9, 90, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    values = probe(lfm2, ids, hidden, chunk_size=7)
    with torch.no_grad():
        output = lfm2.model(torch.tensor([ids]), output_hidden_states=True)
    for layer in range(-1, 2):
        norms = output.hidden_states[layer + 1][0].norm(dim=-1).numpy()
        assert np.allclose(values["hidden_norm", layer][0], norms, rtol=1e-5)
    expected = -output.logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert np.allclose(values["surprisal", None][0, 1:], expected.numpy(), atol=1e-5)
    assert {layer for name, layer in values if name == "attention_output_diff"} == {0, 1, 2}


def test_a_layer_that_bypasses_the_attention_function_is_named(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = llama.model.model.layers[1].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **rest: (hidden_states, None))
    with pytest.raises(CfkvError, match=r"layers 1 of tiny-llama do not call an attention function"):
        probe(llama, [5, 6, 7], members("kv"), chunk_size=8)


def test_commas_and_repeats_in_groups() -> None:
    assert ProbeConfig(groups=("hidden,kv", " logits ", "kv")).groups == ("hidden", "kv", "logits")
    assert set(groups()) >= {"hidden", "kv", "kv_prerotary", "logits", "position", "attention"}
    assert all(signal_kinds.get(name).group in groups() for name in signal_kinds.names())


def test_nothing_stays_when_a_tap_cannot_be_set(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden taps were set already; a signal that fails in the middle of a pass leaves nothing either."""

    def hooks() -> int:
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in llama.model.modules())

    before = hooks()
    with monkeypatch.context() as patch:
        patch.setitem(compat._PARTS, "mlp", ("no_such_name",))
        with pytest.raises(CfkvError, match=r"layer 0 \(LlamaDecoderLayer\) has no mlp module"):
            probe(llama, [5, 6, 7], members("hidden", "attention"), chunk_size=2)
    assert hooks() == before
    for group in ("hidden", "kv", "attention", "logits"):
        signals = members(group)

        def broken(state: Any, observation: Any) -> Any:
            raise ArithmeticError("on purpose")

        monkeypatch.setattr(signals[-1], "update", broken)
        signals += members(*(name for name in ("hidden", "kv", "attention") if name != group))
        with pytest.raises(ArithmeticError, match="on purpose"):
            probe(llama, [5, 6, 7], signals, chunk_size=2)
        assert hooks() == before
        assert llama.model.config._attn_implementation == "sdpa"
        assert not {compat.OBSERVE} & {*AttentionInterface().keys(), *AttentionMaskInterface().keys()}


def test_imported_traces_of_such_a_model_are_scored(lfm2: LoadedModel) -> None:
    """Log-probabilities of one plain forward; a chunk size would cut the convolutions' state, and is not used."""
    ids = torch.randint(9, 90, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    found = teacher_forced_logprobs(lfm2, ids, 12, chunk_size=7)
    with torch.no_grad():
        logits = lfm2.model(torch.tensor([ids])).logits[0, 11:-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(ids[12:])[:, None])[:, 0]
    assert np.allclose(found, expected.numpy(), atol=1e-5)
