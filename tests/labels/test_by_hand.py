"""One worked solution labelled on a real model, and three of its windows done again with plain transformers."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from cfkv.answers import exact_match
from cfkv.config import Execution, LabelConfig, TraceConfig
from cfkv.labels._base import LabelTrace
from cfkv.labels._packed import Counterfactual
from cfkv.labels._replay import Replay
from cfkv.labels.occlusion import Occlusion
from cfkv.models.loading import LoadedModel
from cfkv.traces.items import TraceItem
from cfkv.traces.write import TraceWriter

QUESTION = (
    "A baker sells 12 rolls at 2 dollars each and 5 cakes at 8 dollars each. "
    "How many dollars does he take in?"
)
SOLUTION = (
    "The rolls bring 12 * 2 = 24 dollars.\n"
    "The cakes bring 5 * 8 = 40 dollars.\n"
    "Together that is 24 + 40 = 64 dollars."
)
PREFIX = "The final answer is \\boxed{"
CAP = 6


@dataclass
class ByHand:
    token_ids: list[int]
    answer: str | None
    nll: float


@torch.no_grad()
def regenerate(model: torch.nn.Module, tokenizer: object, context: list[int], draft: list[int]) -> ByHand:
    """Greedy answer after `context` with transformers' own cache, and the draft's mean NLL in one plain pass."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    kept = {name: DynamicCache(), "use_cache": True}
    output = model(torch.tensor([context]), **kept)
    written: list[int] = []
    while True:
        written.append(int(output.logits[0, -1].argmax()))
        text = PREFIX + tokenizer.decode(written)  # type: ignore[attr-defined]
        boxed = re.search(r"\\boxed\{([^{}]*)\}", text)
        if boxed or written[-1] == tokenizer.eos_token_id or len(written) == CAP:  # type: ignore[attr-defined]
            break
        output = model(torch.tensor([written[-1:]]), **kept)
    logits = model(torch.tensor([context + draft])).logits[0, len(context) - 1 : -1]
    nll = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(draft))
    return ByHand(written, boxed[1].strip() if boxed else None, float(nll))


def test_three_windows_by_hand(smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    execution = Execution(device="cpu", threads=1)
    config = TraceConfig(mode="worked_solution", answer_max_new_tokens=CAP)
    item = TraceItem(
        problem_id="p", sample_index=0, question=QUESTION, reference_answer="64", solution=SOLUTION
    )
    (row,) = TraceWriter(smollm2, config, execution, exact_match).rows([item], lambda count: None)
    assert (row["status"], row["answer"], row["correct"]) == ("ok", "64", True)

    regenerated: dict[int, tuple[int, ...]] = {}
    fast = Replay.fast

    def kept(self: Replay, rows: list[Counterfactual], draft: list[int]) -> object:
        results = fast(self, rows, draft)
        regenerated.update({row.keep: result.token_ids for row, result in zip(rows, results, strict=True)})
        return results

    monkeypatch.setattr(Replay, "fast", kept)
    label = Occlusion(
        smollm2, LabelConfig(window=8, stride=4, max_new_tokens=CAP), execution, exact_match
    ).label(LabelTrace.from_row(row))
    assert label.tokens["status"] == "labelled"
    assert {window["flipped"] for window in label.rows} == {True, False}

    # From here on nothing of cfkv is used but the folder of the weights.
    folder = smollm2.tokenizer.name_or_path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    pieces = [prompt, "<think>\n", SOLUTION, "\n</think>\n", PREFIX]
    encoded = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    context = sum(encoded, [])
    first = len(encoded[0]) + len(encoded[1])
    stop = first + len(encoded[2])
    assert row["token_ids"][: row["answer_start"]] == context
    assert (row["reasoning_start"], row["reasoning_stop"]) == (first, stop)
    unused = tokenizer.convert_tokens_to_ids("<empty_output>")

    draft = row["token_ids"][row["answer_start"] :]
    control = regenerate(model, tokenizer, context, draft)
    assert (control.token_ids, control.answer) == (draft, "64")
    largest = 0.0
    for index in (0, 2, len(label.rows) - 1):
        window = label.rows[index]
        start, end = first + 4 * index, min(first + 4 * index + 8, stop)
        assert (window["start"], window["stop"], window["replacement_id"]) == (start, end, unused)
        occluded = context[:start] + [unused] * (end - start) + context[end:]
        hand = regenerate(model, tokenizer, occluded, draft)
        assert list(regenerated[start]) == hand.token_ids
        assert window["answer"] == hand.answer
        assert window["flipped"] == (hand.answer != "64")
        largest = max(largest, abs(window["delta_nll"] - (hand.nll - control.nll)))
        print(f"window {index}: {hand.answer!r}, delta_nll {window['delta_nll']:.6f}")
    print(f"largest difference of delta_nll: {largest:.2e}")
    assert largest < 1e-4
