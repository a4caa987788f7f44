"""Judge the built-in reasoner on held-out problems: accuracy, occlusion flips, knock-out of cached entries.

    python -m pipelines.builtin.evaluate --model data/builtin

Run from the repository root; prints a table and writes `evaluation.json` into the model's folder.

Occlusion: the token ids of a window of the model's own reasoning become the pad id; the attention mask stays
1 and positions stay; the answer is decoded again after prompt, reasoning and `</think>`. A window flips if
the boxed answer differs from the trace's or is missing. Only traces with a correct answer are used, and only
if the unmodified context gives the same answer (the control). A token's label is the OR over its windows.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import islice
from math import ceil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cfkv.problems.registers import END_THINK, PlantedTruth, Registers, planted_truth
from pipelines.builtin.decode import Trace, answers, free_run

WINDOWS = ((8, 4), (16, 8), (32, 16))
CACHE_BUDGET = 32
Figures = dict[str, float]


def windows(num_tokens: int, size: int, stride: int) -> list[tuple[int, int]]:
    """The [start, stop) windows over `num_tokens` tokens; the last one is clipped to the end."""
    number = ceil(max(num_tokens - size, 0) / stride) + 1
    return [(at * stride, min(at * stride + size, num_tokens)) for at in range(number)]


def context_ids(tokenizer: PreTrainedTokenizerFast, trace: Trace) -> tuple[torch.Tensor, int]:
    """The ids of prompt, reasoning and `</think>` as (L,), and the position of the first reasoning token."""
    prompt = trace.problem.question.split()
    words = [*prompt, *(trace.reasoning or []), END_THINK]
    return torch.tensor(tokenizer.convert_tokens_to_ids(words)), len(prompt)


def flips(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, trace: Trace, spans: list[list[int]]
) -> NDArray[np.bool_]:
    """(S,) bool: whether hiding each span (a list of reasoning positions) changes the trace's answer."""
    ids, first = context_ids(tokenizer, trace)
    contexts = ids.repeat(len(spans), 1)
    for row, span in enumerate(spans):
        contexts[row, torch.tensor(span, dtype=torch.int64) + first] = tokenizer.pad_token_id
    return np.array([answer != trace.answer for answer in answers(model, tokenizer, contexts)])


def auroc(score: NDArray[np.bool_], truth: NDArray[np.bool_]) -> float:
    """Area under the ROC curve of a binary score (ties count half): mean of sensitivity and specificity."""
    return float((score[truth].mean() + 1 - score[~truth].mean()) / 2)


def rate(hits: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> Figures:
    """Share of `hits` among the `chosen` (left out if there are none), and how many were chosen."""
    if not chosen.any():
        return {"n": 0}
    return {"rate": float(hits[chosen].mean()), "n": int(chosen.sum())}


def window_study(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, traces: list[Trace], size: int, stride: int
) -> dict[str, Figures]:
    """Flip rates by kind of window, and how well the OR label finds the planted tokens."""
    flipped, labels = [], []
    kinds: dict[str, list[bool]] = {"load-bearing": [], "fused": [], "no fact": [], "filler only": []}
    truths: list[PlantedTruth] = []
    for trace in traces:
        reasoning = trace.reasoning or []
        spans = windows(len(reasoning), size, stride)
        truth = planted_truth(reasoning)
        found = flips(model, tokenizer, trace, [list(range(*span)) for span in spans])
        label = np.zeros(len(reasoning), dtype=bool)
        for (start, stop), flip in zip(spans, found, strict=True):
            label[start:stop] |= flip
            kinds["load-bearing"].append(bool(truth.occlusion[start:stop].any()))
            kinds["fused"].append(bool(truth.fused[start:stop].any()))
            kinds["no fact"].append(not truth.fact[start:stop].any())
            kinds["filler only"].append(bool(truth.filler[start:stop].all()))
        flipped.append(found)
        labels.append(label)
        truths.append(truth)
    hits, pooled = np.concatenate(flipped), np.concatenate(labels)
    study = {f"flips, {kind}": rate(hits, np.array(chosen)) for kind, chosen in kinds.items()}
    for kind in ("occlusion", "cache", "fused", "fact"):
        parts = [getattr(truth, kind) for truth in truths]
        per_trace = [auroc(label, part) for label, part in zip(labels, parts, strict=True)]
        study[f"AUROC, {kind} truth"] = {
            "pooled": auroc(pooled, np.concatenate(parts)),
            "mean over traces": float(np.mean(per_trace)),
            "n": len(traces),
        }
    study["labelled share"] = {"rate": float(pooled.mean()), "n": len(pooled)}
    return study


def parts_of_facts(reasoning: list[str]) -> dict[str, list[int]]:
    """Positions of each part of the tagged lines: line name, tag, operation, digit, fused fact."""
    truth = planted_truth(reasoning)
    parts: dict[str, list[int]] = {"name": [], "tag": [], "operation": [], "digit": [], "fused": []}
    for at in np.flatnonzero(truth.fused).tolist():
        for part, offset in zip(parts, (-4, -3, -2, -1, 0), strict=True):
            parts[part].append(at + offset)
    return parts


def single_token_study(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, traces: list[Trace]
) -> dict[str, Figures]:
    """Flip rate when exactly one token of one tagged line is hidden, by the part of the line."""
    flipped: dict[str, list[bool]] = {}
    for trace in traces:
        parts = parts_of_facts(trace.reasoning or [])
        spans = [[at] for places in parts.values() for at in places]
        names = [name for name, places in parts.items() for _ in places]
        for name, flip in zip(names, flips(model, tokenizer, trace, spans), strict=True):
            flipped.setdefault(name, []).append(bool(flip))
    return {name: {"rate": float(np.mean(hits)), "n": len(hits)} for name, hits in flipped.items()}


def cache_study(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, traces: list[Trace]
) -> dict[str, Figures]:
    """Share of answers kept when cached entries are dropped at `</think>`.

    "drop X" removes only those reasoning entries. "keep X" leaves `CACHE_BUDGET` reasoning entries: the
    planted cache truth and the most recent others, the most recent, or a random draw; the prompt stays
    unless said.
    """
    generator = random.Random("registers/cache-study")
    right: dict[str, list[bool]] = {}
    for trace in traces:
        ids, first = context_ids(tokenizer, trace)
        reasoning = trace.reasoning or []
        everything = set(range(len(reasoning)))
        parts = {name: set(places) for name, places in parts_of_facts(reasoning).items()}
        planted = set(np.flatnonzero(planted_truth(reasoning).cache).tolist())
        others = sorted(everything - planted)
        oracle = planted | set(others[-(CACHE_BUDGET - len(planted)) :])
        kept = {
            "full": everything,
            "drop tag": everything - parts["tag"],
            "drop digit": everything - parts["digit"],
            "drop fused": everything - parts["fused"],
            "drop digit and fused": everything - planted,
            "keep planted and recent": oracle,
            "keep recent": set(sorted(everything)[-CACHE_BUDGET:]),
            "keep random": set(generator.sample(sorted(everything), min(CACHE_BUDGET, len(everything)))),
            "keep planted and recent, no prompt": oracle,
        }
        mask = torch.zeros(len(kept), len(ids) - 1, dtype=torch.bool)
        for row, (name, places) in enumerate(kept.items()):
            mask[row, :first] = "no prompt" not in name
            mask[row, torch.tensor(sorted(places)) + first] = True
        for name, answer in zip(kept, answers(model, tokenizer, ids.repeat(len(kept), 1), mask), strict=True):
            right.setdefault(name, []).append(answer == trace.answer)
    return {name: {"rate": float(np.mean(hits)), "n": len(hits)} for name, hits in right.items()}


def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, problems: int, traces: int, seed: int
) -> dict[str, dict[str, Figures]]:
    """All figures: accuracy on `problems` problems, the studies on the first `traces` correct traces."""
    runs = free_run(model, tokenizer, list(islice(Registers().load(None, seed=seed), problems)))
    correct = [run for run in runs if run.answer == run.problem.answer]
    whole = [run for run in correct if " ".join(run.reasoning or []) == run.problem.solution]
    lengths = [len(run.reasoning) for run in runs if run.reasoning]
    chosen = correct[:traces]
    control = [not flips(model, tokenizer, run, [[]])[0] for run in chosen]
    kept = [run for run, same in zip(chosen, control, strict=True) if same]
    return {
        "free run": {
            "exact answer": {"rate": len(correct) / len(runs), "n": len(runs)},
            "whole trace": {"rate": len(whole) / len(runs), "n": len(runs)},
            "reasoning tokens": {"mean": float(np.mean(lengths)), "max": max(lengths), "n": len(lengths)},
            "control answers the same": {"rate": float(np.mean(control)), "n": len(control)},
        },
        **{
            f"windows of {size}, stride {stride}": window_study(model, tokenizer, kept, size, stride)
            for size, stride in WINDOWS
        },
        "flips, one hidden token": single_token_study(model, tokenizer, kept),
        "answers kept, cache cut at </think>": cache_study(model, tokenizer, kept),
    }


def main() -> None:
    """Parse the command line, evaluate, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--traces", type=int, default=100, help="correct traces for the studies")
    parser.add_argument("--seed", type=int, default=2, help="seed of the held-out problems")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(arguments.model).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.model)
    figures = evaluate(
        model, tokenizer, problems=arguments.problems, traces=arguments.traces, seed=arguments.seed
    )
    for section, rows in figures.items():
        print(section)
        for name, values in rows.items():
            print(f"  {name:36s}", "  ".join(f"{key} {value:.6g}" for key, value in values.items()))
    content = {"problem_seed": arguments.seed, **figures}
    (arguments.model / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
