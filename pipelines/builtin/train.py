"""Train the built-in reasoner (a Llama of 423k parameters) on one CPU thread, in under ten minutes.

    python -m pipelines.builtin.train --seed 0 --out data/builtin
    python -m pipelines.builtin.evaluate --model data/builtin

Run from the repository root. Muon moves the matrices and AdamW the rest; programs grow with time; in the
later part, windows of attended pad tokens hide reasoning, or the answer does not attend to some of it, and
a lost fact is answered `Rk=?`. The folder is an ordinary transformers one; `training_log.json` holds step,
loss, learning rate and seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from cfkv.problems.registers import BOS, EOS, MAX_LINES, PAD, VOCABULARY
from pipelines.builtin.batches import TOKEN_IDS, Batch, Shares, draw_batch
from pipelines.builtin.tokenizer import MAX_LENGTH, build_tokenizer

MUON_RATE, ADAM_RATE = 0.02, 3e-3
WARMUP_STEPS = 60
WHOLE, TAKEN = Shares(occluded=0.0, dropped=0.0), Shares(occluded=0.35, dropped=0.25)
TAKEN_FROM = 0.3
LOG_EVERY = 100


def build_model(seed: int) -> LlamaForCausalLM:
    """The untrained model; `seed` fixes its weights."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=TOKEN_IDS[PAD],
        bos_token_id=TOKEN_IDS[BOS],
        eos_token_id=TOKEN_IDS[EOS],
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    # The pad token is attended in occluded text, so its embedding is an ordinary one, not a frozen zero.
    model.model.embed_tokens.padding_idx = None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=config.initializer_range, generator=generator)
    return model


def line_range(progress: float) -> tuple[int, int]:
    """Smallest and largest number of lines at `progress` (0 to 1) of the training."""
    if progress < 0.12:
        return 4, 6
    if progress < 0.25:
        return 4, 10
    return 8, MAX_LINES


def rate_factor(step: int, steps: int) -> float:
    """Learning rate over its peak: linear warm-up, flat to 60 % of the steps, linear to 3 %."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return min(1.0, 1.0 - 0.97 * (step / steps - 0.6) / 0.4)


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon on the matrices inside the layers, AdamW on embeddings and norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    held = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in held]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Weighted mean cross-entropy in nats; padding is at the right, where a causal model does not see it."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.mask, use_cache=False).logits
    losses = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    weights = batch.weights.flatten()
    return (losses * weights).sum() / weights.sum()


def train(seed: int, steps: int, tokens_per_step: int) -> tuple[LlamaForCausalLM, dict[str, object]]:
    """Train for `steps` steps of about `tokens_per_step` tokens; returns the model and its log."""
    generator = random.Random(f"registers/training/{seed}")
    model = build_model(seed)
    optimizers = build_optimizers(model)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    rows: list[dict[str, float]] = []
    begin, seen, recent = time.monotonic(), 0, []
    for step in range(steps):
        progress = step / steps
        batch = draw_batch(
            generator,
            lines=line_range(progress),
            num_tokens=tokens_per_step,
            shares=TAKEN if progress >= TAKEN_FROM else WHOLE,
        )
        seen += batch.input_ids.numel()
        factor = rate_factor(step, steps)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * factor
        loss = batch_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % LOG_EVERY == 0 or step + 1 == steps:
            seconds = time.monotonic() - begin
            row = {"step": step + 1, "loss": sum(recent) / len(recent), "rate": factor, "seconds": seconds}
            rows.append({key: round(value, 5) for key, value in row.items()})
            recent = []
            print(f"step {step + 1:5d}  loss {row['loss']:.4f}  {seconds:6.1f} s", flush=True)
    return model, {"seed": seed, "steps": steps, "tokens": seen, "torch": torch.__version__, "log": rows}


def save(model: LlamaForCausalLM, log: dict[str, object], folder: Path) -> None:
    """Write the model, its tokenizer, its generation settings and the training log to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_LENGTH // 2 + 64,
        pad_token_id=TOKEN_IDS[PAD],
        bos_token_id=TOKEN_IDS[BOS],
        eos_token_id=TOKEN_IDS[EOS],
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    build_tokenizer().save_pretrained(folder)
    (folder / "training_log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--tokens-per-step", type=int, default=2500)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, log = train(arguments.seed, arguments.steps, arguments.tokens_per_step)
    save(model, log, arguments.out)


if __name__ == "__main__":
    main()
