"""How a question becomes prompt tokens."""

from __future__ import annotations

from typing import Any

from cfkv.config import TraceConfig
from cfkv.errors import ItemError
from cfkv.models.tokens import THINK_START, decode, encode
from cfkv.traces.items import TraceItem

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
WORKED_ANSWER_PREFIX = r"The final answer is \boxed{"


def prompt_ids(tokenizer: Any, item: TraceItem, config: TraceConfig) -> list[int]:
    """Token ids of an item's prompt: given ids, given text, or the question in the chat template.

    A tokenizer without a chat template gets the question as it is.
    """
    if isinstance(item.prompt, tuple):
        return list(item.prompt)
    if item.prompt is not None:
        return encode(tokenizer, item.prompt)
    chat = bool(getattr(tokenizer, "chat_template", None))
    default = INSTRUCTION if chat and config.mode == "generate" else ""
    instruction = default if config.instruction is None else config.instruction
    question = f"{item.question}\n{instruction}" if instruction else item.question
    if not chat:
        return list(tokenizer(question)["input_ids"])
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return encode(tokenizer, text)


def worked_pieces(
    tokenizer: Any, prompt: list[int], item: TraceItem, prefix: str
) -> tuple[list[int], list[int], list[int]]:
    r"""Token ids of what opens the reasoning, of the worked solution, and of what follows up to the answer.

    `<think>\n`, the solution, then `\n</think>\n` and the answer prefix (architecture 8). The pieces are
    tokenised one by one, so that the spans are known exactly. A prompt that already ends with `<think>` gets
    no second one.

    Raises
    ------
    ItemError
        If the problem has no worked solution.
    """
    if not item.solution:
        raise ItemError("no_solution", "the dataset gives no worked solution for this problem")
    opened = decode(tokenizer, prompt[-8:]).rstrip().endswith(THINK_START)
    before = [] if opened else encode(tokenizer, f"{THINK_START}\n")
    closing = encode(tokenizer, "\n</think>\n") + (encode(tokenizer, prefix) if prefix else [])
    return before, encode(tokenizer, item.solution), closing
