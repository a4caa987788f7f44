"""`bench oracle` and `bench labels` on a random-weight Llama of 1.2B parameters, made in memory: no download.

    python -m pipelines.gpu_benchmarks                 # on a GPU; writes data/benchmarks/gpu_NAME.json
    python -m pipelines.gpu_benchmarks --tiny --out d  # a small float32 model on a CPU: tests this script

Needs this repository and its packages alone. No GPU figure has been measured yet: the defaults are guesses that should
take under five minutes on a data-centre GPU, and after --time-limit seconds the script stops and writes what it has.

The model has the sizes of Llama-3.2-1B and the tokenizer of the built-in model, whose 177 words are the only ones that
it reads. Speed and memory of a forward do not depend on what the weights say. What does: a random model writes no box,
so that each answer runs to its cap, and its two largest logits are often close, so that a window or rounding alone ends
far more drafts than in a trained model. `accepted drafts` says how many; the ratios of the bench labels hold for that
share, and are those of its hard case. (The whole model on a CPU, 48 tokens of reasoning: 0 of 6 short drafts accepted,
1 of 6 long ones.) The final norm is scaled up so that logits are as large as a trained model's, about 20, for which
the narrow margin is meant (`cfkv.margins`).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cfkv.bench._base import as_json, benches, machine, report
from cfkv.bench._peak import highest_bytes, watch_from_here
from cfkv.config import BenchConfig, ModelConfig
from cfkv.errors import CfkvError
from cfkv.models.loading import LoadedModel, load_tokenizer, model_shape
from cfkv.models.tokens import end_ids
from cfkv.problems.registers import held_out_program

OUT = Path(__file__).resolve().parents[1] / "data" / "benchmarks"
BENCHES = ("oracle", "labels")
SEED = 0
NORM = 5.0  # makes the largest logit about 20
ONE_BILLION: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **ONE_BILLION,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def random_model(sizes: dict[str, Any], dtype: torch.dtype, device: torch.device, kernel: str) -> LoadedModel:
    """A seeded model on the device, with the built-in tokenizer."""
    tokenizer = load_tokenizer(ModelConfig())
    config = LlamaConfig(
        **sizes,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation=kernel)
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    with torch.no_grad():
        model.model.norm.weight.fill_(NORM)
    count = sum(weight.numel() for weight in model.parameters())
    return LoadedModel(
        name=f"random Llama, {count / 1e9:.3g}B parameters",
        revision=f"seed {SEED}",
        weights="random",
        model=model,
        tokenizer=tokenizer,
        device=model.device,
        dtype=model.dtype,
        shape=model_shape(model),
        end_ids=end_ids(tokenizer, model),
        attn_implementation=kernel,
    )


def write_problems(file: Path, count: int, reasoning: int) -> None:
    """Problems in GSM8K's format whose solutions have at least `reasoning` tokens of the built-in vocabulary."""
    lines = []
    for number in range(count):
        words: list[str] = []
        index = 100 * number
        while len(words) < reasoning:
            words += held_out_program(SEED, index).reasoning_words()
            index += 1
        question = " ".join(held_out_program(SEED, 100 * number).prompt_words()[:-1])
        lines.append(
            json.dumps({"question": question, "answer": f"{' '.join(words[:reasoning])}\n#### {number}"})
        )
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def hardware(loaded: LoadedModel) -> dict[str, Any]:
    """The machine as the benches have it, and what else a GPU figure depends on."""
    found = machine(loaded) | {"driver": _driver(), "cuda": torch.version.cuda, "gpu_memory_gib": None}
    if loaded.device.type == "cuda":
        facts = torch.cuda.get_device_properties(loaded.device)
        found["gpu_memory_gib"] = round(facts.total_memory / 2**30, 1)
        found["compute_capability"] = f"{facts.major}.{facts.minor}"
    return found


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(said.split()), None)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(loaded: LoadedModel, config: BenchConfig, seconds: float) -> list[dict[str, Any]]:
    """Both benches in turn, each with its peak memory; what the time did not reach says so."""
    found: list[dict[str, Any]] = []
    place, deadline = machine(loaded), time.monotonic() + seconds
    for name in BENCHES:
        watch_from_here(loaded.device)
        start = time.monotonic()
        entry: dict[str, Any] = {"bench": name, "rows": [], "stopped": None}
        try:
            with time_limit(deadline - start):
                rows = benches.get(name)().run(loaded, config)
            report(name, place, rows, None)
            entry["rows"] = as_json(name, place, rows)["rows"]
        except TimeoutError:
            entry["stopped"] = f"the time limit of {seconds:g} s"
        except (torch.OutOfMemoryError, CfkvError) as error:
            entry["stopped"] = str(error).splitlines()[0]
        entry["seconds"] = round(time.monotonic() - start, 1)
        peak = highest_bytes(loaded.device)
        entry["peak_memory_mib"] = None if peak is None else round(peak / 2**20)
        found.append(entry)
        print(
            f"{name}: {entry['stopped'] or 'done'}, {entry['seconds']} s, peak {entry['peak_memory_mib']} MiB"
        )
    return found


def parser() -> argparse.ArgumentParser:
    """The flags, with sizes for a data-centre GPU."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--device", default="cuda")
    made.add_argument("--attn-implementation", default="sdpa", choices=["sdpa", "eager"])
    made.add_argument("--prefix", type=int, default=2048, help="oracle: cached tokens")
    made.add_argument("--candidates", type=int, default=256, help="oracle: single removals")
    made.add_argument("--horizon", type=int, default=8, help="oracle: replayed tokens")
    made.add_argument("--chunk-size", type=int, default=2048, help="most tokens per forward")
    made.add_argument("--reasoning", type=int, default=1024, help="labels: tokens of reasoning per trace")
    made.add_argument("--window", type=int, default=32, help="labels: tokens per window")
    made.add_argument("--traces", type=int, default=1, help="labels: traces per case")
    made.add_argument("--answer-tokens", type=int, default=128, help="labels: tokens of a long answer")
    made.add_argument("--time-limit", type=float, default=270, help="seconds for both benches together")
    made.add_argument("--name", help="names the file; the default is the GPU's name")
    made.add_argument("--out", type=Path, help="folder of the JSON file; the default is data/benchmarks")
    made.add_argument("--tiny", action="store_true", help="a small float32 model on a CPU; needs --out")
    return made


def main(arguments: Sequence[str] | None = None) -> Path:
    """Make the model, run the benches, write the file."""
    flags = parser()
    given = flags.parse_args(arguments)
    if given.tiny and given.out is None:
        flags.error("--tiny needs --out FOLDER: its figures are no benchmark of this repository")
    if not given.tiny and not (given.device.startswith("cuda") and torch.cuda.is_available()):
        flags.error(f"--device {given.device}: this needs a CUDA device; --tiny tests the script on a CPU")
    device = torch.device("cpu" if given.tiny else given.device)
    sizes, dtype = (TINY, torch.float32) if given.tiny else (ONE_BILLION, torch.bfloat16)
    loaded = random_model(sizes, dtype, device, given.attn_implementation)
    place = hardware(loaded)
    settings = {
        name: getattr(given, name)
        for name in ("prefix", "candidates", "horizon", "chunk_size", "window", "traces", "answer_tokens")
    }
    with tempfile.TemporaryDirectory() as scratch:
        problems = Path(scratch) / "problems.jsonl"
        write_problems(problems, given.traces, given.reasoning)
        found = measure(loaded, BenchConfig(path=problems, **settings), given.time_limit)
    name = given.name or ("tiny" if given.tiny else place["gpu"])
    out = given.out or OUT
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"gpu_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_').lower()}.json"
    content = {
        "hardware": place,
        "settings": settings | {"reasoning": given.reasoning, "seed": SEED},
        "peak_memory": "bytes held by the GPU's allocator at most, weights included; None on a CPU",
        "benches": found,
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(file)
    return file


if __name__ == "__main__":
    main()
