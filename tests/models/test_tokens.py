"""Token texts add up to the decoded text; special tokens are found by what they are for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from cfkv.errors import CfkvError
from cfkv.models.loading import LoadedModel
from cfkv.models.tokens import (
    decode,
    encode,
    end_ids,
    find_last,
    replacement_id,
    reserved_id,
    token_texts,
)

PLAIN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MIXED = "naïve “quotes” — 漢字仮名 🙂👩‍👩‍👧 Ω≈ç\n\tend"


def check_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == decode(tokenizer, ids)
    return texts


@PLAIN
@given(ids=st.lists(st.integers(0, 99), max_size=30))
def test_token_texts_of_words(word_tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    check_texts(word_tokenizer, ids)


@PLAIN
@given(ids=st.lists(st.integers(0, 264), max_size=30))
def test_token_texts_of_any_bytes(byte_tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    """Most byte sequences are not UTF-8: the broken parts show as replacement characters, nothing is lost."""
    check_texts(byte_tokenizer, ids)


@PLAIN
@given(text=st.text(max_size=20))
def test_token_texts_of_unicode(byte_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = encode(byte_tokenizer, text)
    assert "".join(check_texts(byte_tokenizer, ids)) == text


def test_character_over_several_tokens_appears_at_its_last(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(byte_tokenizer, "a漢é!")
    assert token_texts(byte_tokenizer, ids) == ["a", "", "", "漢", "", "é", "!"]
    assert token_texts(byte_tokenizer, ids[:3]) == ["a", "", "�"]


def test_token_texts_of_the_builtin_model(builtin: LoadedModel) -> None:
    texts = check_texts(builtin.tokenizer, list(range(builtin.shape.vocabulary)))
    assert all(texts)


def test_token_texts_of_smollm2(smollm2: LoadedModel) -> None:
    ids = encode(smollm2.tokenizer, MIXED)
    assert "".join(check_texts(smollm2.tokenizer, ids)) == MIXED
    assert "" in token_texts(smollm2.tokenizer, ids)  # some character does take several tokens
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        check_texts(smollm2.tokenizer, torch.randint(49152, (24,), generator=generator).tolist())


@given(ids=st.lists(st.integers(0, 2), max_size=12), pattern=st.lists(st.integers(0, 2), max_size=4))
def test_find_last(ids: list[int], pattern: list[int]) -> None:
    hits = [i for i in range(len(ids) + 1) if ids[i : i + len(pattern)] == pattern]
    fitting = [i for i in hits if i + len(pattern) <= len(ids)]
    assert find_last(ids, pattern) == (max(fitting) if fitting else None)


def make_tokenizer(*special: str, template: str | None = None, **roles: str) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<eos>", "<pad>", "a", *special]
    made = Tokenizer(token_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", additional_special_tokens=list(special), **roles
    )
    tokenizer.chat_template = template
    return tokenizer


def model_of(vocabulary: int, end: int | list[int] | None = 1) -> Any:
    embeddings = SimpleNamespace(weight=torch.empty(vocabulary, 1))
    return SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=end), get_input_embeddings=lambda: embeddings
    )


ROLES = {"eos_token": "<eos>", "pad_token": "<pad>"}


def test_end_ids() -> None:
    tokenizer = make_tokenizer("<|end|>", **ROLES)
    assert end_ids(tokenizer, model_of(5, [4, 1])) == {1, 4}
    assert end_ids(tokenizer, model_of(5, 4)) == {1, 4}
    assert end_ids(tokenizer, model_of(5, None)) == {1}
    assert end_ids(make_tokenizer(pad_token="<pad>"), model_of(4, None)) == frozenset()


@pytest.mark.parametrize(
    ("special", "template", "expected"),
    [
        (("<|reserved_1|>", "<|reserved_2|>"), None, 5),  # among equals the highest
        (("<|unused|>", "<|file|>"), None, 4),  # a telling name wins over a higher id
        (("<|file|>", "<|repo|>"), None, 5),
        (("<|im_start|>", "<|file|>"), "{{ '<|im_start|>' + '<|file|>' }}", None),
        (("<|reserved|>", "<|user|>"), "<|user|>", 4),
        (("<think>", "</think>"), None, None),
        ((), None, None),
    ],
)
def test_reserved_id(special: tuple[str, ...], template: str | None, expected: int | None) -> None:
    tokenizer = make_tokenizer(*special, template=template, **ROLES)
    assert reserved_id(tokenizer, frozenset({1})) == expected


def test_reserved_id_is_no_end_token() -> None:
    tokenizer = make_tokenizer("<|reserved_1|>", "<|reserved_2|>", **ROLES)
    assert reserved_id(tokenizer, frozenset({1, 5})) == 4


@pytest.mark.parametrize(
    ("roles", "special", "choice", "expected"),
    [
        (ROLES, ("<|reserved|>",), "pad", 2),
        (ROLES, ("<|reserved|>",), "eos", 1),
        (ROLES, ("<|reserved|>",), "reserved", 4),
        (ROLES, ("<|reserved|>",), "auto", 2),
        ({"eos_token": "<eos>", "pad_token": "<eos>"}, ("<|reserved|>",), "auto", 4),  # pad ends the text
        ({"eos_token": "<eos>", "pad_token": "<eos>"}, ("<|reserved|>",), "pad", 1),
        ({"eos_token": "<eos>", "bos_token": "<pad>", "pad_token": "<pad>"}, ("<|unused|>",), "auto", 4),
        ({"eos_token": "<eos>"}, ("<|reserved|>",), "auto", 4),
        (ROLES, (), "3", 3),
        (ROLES, (), "0", 0),
    ],
)
def test_replacement_id(roles: dict[str, str], special: tuple[str, ...], choice: str, expected: int) -> None:
    tokenizer = make_tokenizer(*special, **roles)
    assert replacement_id(tokenizer, model_of(4 + len(special)), choice) == expected


@pytest.mark.parametrize(
    ("roles", "choice", "message"),
    [
        (ROLES, "4", "replacement 4 is outside the vocabulary of 4 ids"),
        (ROLES, "mask", "'mask' is none of auto, pad, eos, reserved or a token id"),
        (ROLES, "-1", "'-1' is none of"),
        (ROLES, "reserved", r"no token for replacement 'reserved' \(it has pad=2, eos=1, auto=2\)"),
        (
            {"eos_token": "<eos>", "pad_token": "<eos>"},
            "auto",
            "no token for replacement 'auto'.*give a token",
        ),
        ({"eos_token": "<eos>"}, "pad", "no token for replacement 'pad'"),
    ],
)
def test_replacement_id_errors(roles: dict[str, str], choice: str, message: str) -> None:
    with pytest.raises(CfkvError, match=message):
        replacement_id(make_tokenizer(**roles), model_of(4), choice)


def test_replacements_of_the_models_at_hand(
    builtin: LoadedModel, make_tiny: Callable[..., LoadedModel]
) -> None:
    assert replacement_id(builtin.tokenizer, builtin.model, "auto") == builtin.tokenizer.pad_token_id == 0
    tiny = make_tiny("llama", "sdpa")
    assert replacement_id(tiny.tokenizer, tiny.model, "reserved") == 4


def test_replacement_of_smollm2_ends_nothing(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    chosen = replacement_id(tokenizer, smollm2.model, "auto")
    print(f"smollm2 replacement: {chosen} {tokenizer.convert_ids_to_tokens(chosen)}")
    assert chosen not in smollm2.end_ids | {0, tokenizer.pad_token_id, tokenizer.eos_token_id}
    assert tokenizer.convert_ids_to_tokens(chosen) not in tokenizer.chat_template
