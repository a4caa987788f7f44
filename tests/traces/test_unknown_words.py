"""Text that another model wrote is not quietly read as unknown words."""

from __future__ import annotations

from cfkv.answers import exact_match
from cfkv.config import Execution, TraceConfig
from cfkv.models.loading import LoadedModel
from cfkv.traces.items import TraceItem
from cfkv.traces.write import TraceWriter


def test_english_is_no_trace_of_the_builtin_model(builtin: LoadedModel) -> None:
    """Of `ask`, eight words and `</think>`, `\\boxed{`, `7`, `}`: the failure names the share and the way out."""
    config = TraceConfig(mode="import")
    writer = TraceWriter(builtin, config, Execution(), exact_match)
    item = TraceItem(
        problem_id="p",
        sample_index=0,
        question="ask",
        reference_answer="7",
        response="Tom has three apples and buys more </think> \\boxed{ 7 }",
    )
    row = writer.rows([item], lambda count: None)[0]
    assert row["status"] == "unknown_words"
    ids = builtin.tokenizer(f"ask {item.response}")["input_ids"]
    unknown = ids.count(builtin.tokenizer.unk_token_id)
    assert unknown == 4  # Tom, three, apples, buys
    assert row["reason"].startswith(f"{unknown} of {len(ids)} tokens are unknown to builtin; name the model")
