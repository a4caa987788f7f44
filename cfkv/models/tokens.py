"""Token ids are the truth; this file turns them into text for display, and finds special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cfkv.errors import CfkvError

THINK_START, THINK_END = "<think>", "</think>"
RESERVED = re.compile(r"reserved|unused|extra_id|empty|dummy|placeholder", re.IGNORECASE)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`, with no special token added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of `ids`, special tokens included, spaces as they are."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, for display; their concatenation is the decoded text.

    A character that is spread over several tokens appears at the last of them; the others are empty.
    """
    texts: list[str] = []
    anchor = pending = 0
    for index in range(len(ids)):
        before = decode(tokenizer, ids[anchor:pending])
        after = decode(tokenizer, ids[anchor : index + 1])
        if after.endswith("�") and index + 1 < len(ids):
            texts.append("")
            continue
        texts.append(after[len(before) :])
        anchor, pending = pending, index + 1
    return texts


def find_last(ids: Sequence[int], pattern: Sequence[int]) -> int | None:
    """Start of the last occurrence of `pattern` in `ids`, or None."""
    ids, pattern = list(ids), list(pattern)
    for start in range(len(ids) - len(pattern), -1, -1):
        if ids[start : start + len(pattern)] == pattern:
            return start
    return None


def end_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """Ids that end a generation: the generation config's and the tokenizer's."""
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    declared = declared if isinstance(declared, list | tuple) else [declared]
    return frozenset(i for i in [*declared, tokenizer.eos_token_id] if i is not None)


def reserved_id(tokenizer: Any, ends: frozenset[int]) -> int | None:
    """A special token that has no role: not bos, eos, pad, unk, nor in the chat template.

    One whose name says reserved, unused or empty is preferred; among equals the highest id.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    roles = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        *ends,
    }
    special = {
        token_id: str(token)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in roles and str(token) not in template
    }
    special = {i: text for i, text in special.items() if text not in (THINK_START, THINK_END)}
    if not special:
        return None
    return max(special, key=lambda i: (bool(RESERVED.search(special[i])), i))


def replacement_id(tokenizer: Any, model: Any, choice: str) -> int:
    """The token id that occlusion puts in place of a window's tokens.

    Parameters
    ----------
    choice : str
        `pad`, `eos`, `reserved`, a token id in digits, or `auto` (pad if it is no end token, else reserved).

    Raises
    ------
    CfkvError
        If the model has no such token or the id is outside its vocabulary.
    """
    ends = end_ids(tokenizer, model)
    pad, eos, reserved = tokenizer.pad_token_id, tokenizer.eos_token_id, reserved_id(tokenizer, ends)
    own_pad = pad if pad is not None and pad not in ends and pad != tokenizer.bos_token_id else None
    found = {
        "pad": pad,
        "eos": eos,
        "reserved": reserved,
        "auto": own_pad if own_pad is not None else reserved,
    }
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if choice.isascii() and choice.isdecimal():
        if int(choice) >= vocabulary:
            raise CfkvError(f"replacement {choice} is outside the vocabulary of {vocabulary} ids")
        return int(choice)
    if choice not in found:
        raise CfkvError(f"replacement {choice!r} is none of auto, pad, eos, reserved or a token id in digits")
    if found[choice] is None:
        have = ", ".join(f"{name}={token}" for name, token in found.items() if token is not None)
        raise CfkvError(
            f"the tokenizer has no token for replacement {choice!r} (it has {have or 'none'}); give a token id"
        )
    return int(found[choice])
