"""The released built-in model: its files, its tokenizer, and what it was built to do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from cfkv.problems.registers import VOCABULARY, Problem, Registers, planted_truth

FOLDER = Path(__file__).parents[1] / "data" / "builtin"
SEED = 20
"""Problems that neither training nor the model card has used."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return list(islice(Registers().load(None, seed=SEED), 100))


@pytest.fixture(scope="module")
def texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> list[list[str]]:
    """The words that the model writes after each prompt, up to and without `<eos>`."""
    inputs = tokenizer([problem.question for problem in problems], padding=True, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**{key: inputs[key] for key in ("input_ids", "attention_mask")})
    written = [tokenizer.decode(row).split() for row in output[:, inputs["input_ids"].shape[1] :]]
    return [words[: words.index("<eos>")] if "<eos>" in words else words for words in written]


def box(words: list[str]) -> str:
    """The text between `\\boxed{` and the next `}`, empty where there is none."""
    text = " ".join(words)
    return text.partition("\\boxed{ ")[2].partition(" }")[0]


def test_weights_are_small_fp32_safetensors() -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size < 2_000_000
    with safe_open(path, framework="pt") as weights:
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.float32}  # noqa: SIM118
    assert not [found for found in FOLDER.iterdir() if found.suffix in {".bin", ".pt", ".pth", ".pkl"}]


def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> None:
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == list(VOCABULARY)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    problem = problems[0]
    text = f"{problem.question} {problem.solution} </think> \\boxed{{ {problem.answer} }} <eos>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.split())
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_stop_and_pad_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.do_sample is False


def test_answers_held_out_problems(texts: list[list[str]], problems: list[Problem]) -> None:
    right = [box(words) == problem.answer for words, problem in zip(texts, problems, strict=True)]
    assert sum(right) >= 95


def test_hidden_windows_flip_where_planted(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[list[str]],
    problems: list[Problem],
) -> None:
    """Windows of 8 tokens, stride 4: forced answer after `</think>`, compared word by word with the trace's.

    The whole answer is fed and every word must be the argmax, which is the same event as the greedy answer
    being the same, in one forward pass.
    """
    bearing: list[bool] = []
    idle: list[bool] = []
    for problem, words in list(zip(problems, texts, strict=True))[:20]:
        if box(words) != problem.answer:
            continue
        prompt = problem.question.split()
        end = words.index("</think>")
        truth = planted_truth(words[:end])
        ids = torch.tensor(tokenizer.convert_tokens_to_ids([*prompt, *words, "<eos>"]))
        starts = range(0, end - 4, 4)
        contexts = ids.repeat(len(starts), 1)
        for row, start in enumerate(starts):
            contexts[row, len(prompt) + start : len(prompt) + min(start + 8, end)] = tokenizer.pad_token_id
        first = len(prompt) + end + 1
        with torch.inference_mode():
            logits = model(contexts, logits_to_keep=len(ids) - first + 1).logits[:, :-1]
        flipped = (logits.argmax(-1) != ids[first:]).any(dim=1)
        for start, flip in zip(starts, flipped.tolist(), strict=True):
            if truth.occlusion[start : start + 8].any():
                bearing.append(flip)
            elif not truth.fact[start : start + 8].any():
                idle.append(flip)
    assert len(bearing) > 100
    assert len(idle) > 300
    assert sum(bearing) / len(bearing) >= 0.9
    assert sum(idle) / len(idle) <= 0.01
