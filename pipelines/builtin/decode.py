"""Greedy decoding for the evaluation of the built-in reasoner: free runs, and answers from a context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from cfkv.problems.registers import BOX_CLOSE, BOX_OPEN, END_THINK, NUM_SLOTS, Problem

ANSWER_TOKENS = NUM_SLOTS + 3
"""Tokens after `</think>`: the opened box, one fused fact per slot, the closed box and `<eos>`."""


@dataclass(frozen=True)
class Trace:
    """One greedy free run: the problem, its reasoning words (None without `</think>`), the boxed answer."""

    problem: Problem
    reasoning: list[str] | None
    answer: str | None


def boxed(words: Sequence[str]) -> str | None:
    """The text of the first box in `words`, or None if no box is opened and closed."""
    if BOX_OPEN not in words:
        return None
    rest = list(words[words.index(BOX_OPEN) + 1 :])
    return " ".join(rest[: rest.index(BOX_CLOSE)]) if BOX_CLOSE in rest else None


@torch.inference_mode()
def free_run(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    batch_size: int = 125,
) -> list[Trace]:
    """Let the model write reasoning and answer to every problem, greedily, in left-padded batches."""
    traces = []
    for start in range(0, len(problems), batch_size):
        chunk = problems[start : start + batch_size]
        inputs = tokenizer([problem.question for problem in chunk], padding=True, return_tensors="pt")
        output = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False
        )
        for problem, row in zip(chunk, output[:, inputs["input_ids"].shape[1] :], strict=True):
            words = list(tokenizer.convert_ids_to_tokens(row.tolist()))
            if END_THINK not in words:
                traces.append(Trace(problem, None, None))
                continue
            end = words.index(END_THINK)
            traces.append(Trace(problem, words[:end], boxed(words[end:])))
    return traces


@torch.inference_mode()
def answers(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    input_ids: Tensor,
    kept: Tensor | None = None,
) -> list[str | None]:
    """The boxed answers that the model writes after each context.

    Parameters
    ----------
    input_ids : (B, L) int64
        Prompt, reasoning and `</think>`; every token is attended at its own position.
    kept : (B, L - 1) bool, optional
        Cached entries that `</think>` and the answer may attend to; all of them if left out. The entries
        themselves are always computed from the whole context.

    Returns
    -------
    list of str or None, length B
        None where no box was opened and closed.
    """
    batch_size, length = input_ids.shape
    cache = DynamicCache(config=model.config)
    mask = torch.ones(batch_size, length - 1, dtype=torch.int64)
    model(input_ids=input_ids[:, :-1], attention_mask=mask, past_key_values=cache, logits_to_keep=1)
    if kept is not None:
        mask = kept.to(torch.int64)
    token = input_ids[:, -1:]
    written = []
    for step in range(ANSWER_TOKENS - 1):
        mask = torch.cat([mask, mask.new_ones(batch_size, 1)], dim=1)
        position = torch.full((batch_size, 1), length - 1 + step)
        logits = model(
            input_ids=token, attention_mask=mask, position_ids=position, past_key_values=cache
        ).logits
        token = logits[:, -1:].argmax(-1)
        written.append(token)
    return [boxed(list(tokenizer.convert_ids_to_tokens(row.tolist()))) for row in torch.cat(written, dim=1)]
