"""The word-level tokenizer of the built-in reasoner: text is words joined by single spaces."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from cfkv.problems.registers import BOS, EOS, PAD, UNKNOWN, VOCABULARY

MAX_LENGTH = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A transformers tokenizer over `VOCABULARY` that adds no token of its own (`<bos>` is in the prompt)."""
    vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
