"""Loading a model and its tokenizer, once per process.

safetensors only, remote code off unless asked for. A GGUF file is dequantised once and kept as safetensors in
the cache folder (CFKV_CACHE, else cfkv/ under the hub's cache).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from cfkv.config import Execution, ModelConfig
from cfkv.errors import CfkvError
from cfkv.models import compat
from cfkv.models.sources import ModelSource, resolve
from cfkv.models.tokens import end_ids

# Below this hidden size a matrix product is too short to be shared out: with two threads on a busy machine a
# decode step of the built-in model took 200 times as long as with one.
SINGLE_THREAD_HIDDEN = 256


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; `layer_types` has one word per layer."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocabulary: int
    max_positions: int
    layer_types: tuple[str, ...]
    shared_layers: int


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run, with what identifies it in tables."""

    name: str
    revision: str
    weights: str
    model: nn.Module
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    shape: ModelShape
    end_ids: frozenset[int]
    attn_implementation: str
    local: bool = False  # read from a path: the content identifies it, not the spelling

    @property
    def identity(self) -> dict[str, Any]:
        """What of a model can change a number, for fingerprints."""
        return {
            "model": "local" if self.local else self.name,
            "revision": self.revision,
            "weights": self.weights,
            "dtype": str(self.dtype).removeprefix("torch."),
            "attn_implementation": self.attn_implementation,
        }


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer alone (for dry runs and imports)."""
    return _pretrained(AutoTokenizer, _readable(resolve(config)), config)


def load_model(config: ModelConfig, execution: Execution) -> LoadedModel:
    """Load the model named by `config` onto this process's device.

    Raises
    ------
    CfkvError
        If it cannot be found, has no safetensors weights, or needs code of its own.
    """
    transformers_logging.disable_progress_bar()
    source = resolve(config)
    device = _device(execution.device)
    if config.attn_implementation == "flex_attention" and device.type == "cpu":
        raise CfkvError("flex_attention needs a GPU; use --attn-implementation sdpa or eager on a CPU")
    options: dict[str, Any] = {
        "dtype": _dtype(config, device),
        "attn_implementation": config.attn_implementation,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    if execution.device_map is not None:
        options["device_map"] = execution.device_map
    place = _readable(source)
    # Read apart: the loaded model's configuration says the compute dtype, not the checkpoint's.
    released = getattr(_pretrained(AutoConfig, place, config), "dtype", None)
    tokenizer = _pretrained(AutoTokenizer, place, config)
    model, info = _pretrained(AutoModelForCausalLM, place, config, **options)
    _refuse_missing(source, info)
    if execution.device_map is None:
        model = model.to(device)
    model.eval()
    model.requires_grad_(requires_grad=False)
    shape = model_shape(model)
    threads = execution.threads or (1 if shape.hidden_size < SINGLE_THREAD_HIDDEN else None)
    if threads is not None and device.type == "cpu":
        torch.set_num_threads(threads)
    revision = _commit(source) if source.kind == "hub" else source.revision or "unknown"
    return LoadedModel(
        name=source.name,
        revision=revision,
        weights=source.weights or str(released or model.dtype).removeprefix("torch."),
        model=model,
        tokenizer=tokenizer,
        device=model.device,
        dtype=model.dtype,
        shape=shape,
        end_ids=end_ids(tokenizer, model),
        attn_implementation=model.config._attn_implementation,
        local=source.local,
    )


def model_shape(model: nn.Module) -> ModelShape:
    """Read the sizes off a model's configuration."""
    config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    heads = config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        vocabulary=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None) or 2**31 - 1,
        layer_types=tuple(compat.layer_types(config)),
        shared_layers=getattr(config, "num_kv_shared_layers", None) or 0,
    )


def _device(name: str) -> torch.device:
    try:
        device = None if name == "auto" else torch.device(name)
    except RuntimeError as error:
        raise CfkvError(f"--device {name!r} is none of auto, cpu, cuda, cuda:N, mps") from error
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise CfkvError(
            f"--device {name}: this torch sees no CUDA device; use --device cpu, or a CUDA build of torch"
        )
    state = PartialState(cpu=name == "cpu" or not torch.cuda.is_available())
    return torch.device(state.device) if device is None else device


def _refuse_missing(source: ModelSource, info: dict[str, Any]) -> None:
    """A tensor that the checkpoint lacks is drawn at random: labels of such a model would mean nothing."""
    for what in ("missing_keys", "mismatched_keys"):
        names = sorted(str(key) for key in info.get(what) or ())
        if names:
            raise CfkvError(
                f"model {source.name!r}: the checkpoint has no fitting weights for {len(names)} tensors (first: "
                f"{names[0]}), so they would be random; use a complete checkpoint"
            )


def _commit(source: ModelSource) -> str:
    """The commit that a hub id and revision were resolved to: the name of the snapshot folder it was read from."""
    found = try_to_load_from_cache(source.place, "config.json", revision=source.revision or "main")
    return Path(found).parent.name if isinstance(found, str) else source.revision or "unknown"


def _dtype(config: ModelConfig, device: torch.device) -> Any:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, config.dtype)


def _readable(source: ModelSource) -> ModelSource:
    """The source as `from_pretrained` reads it: for a GGUF file, the folder with its dequantised weights."""
    if source.kind != "gguf":
        return source
    return replace(source, kind="folder", place=str(_dequantised(source)))


def _pretrained(kind: Any, source: ModelSource, config: ModelConfig, **options: Any) -> Any:
    revision = config.revision if source.kind == "hub" else None
    try:
        return kind.from_pretrained(
            source.place, revision=revision, trust_remote_code=config.trust_remote_code, **options
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        text = " ".join(str(error).split()) or repr(error)
        hint = "check the name, the network or HF_HUB_OFFLINE"
        if source.kind != "hub":
            hint = "it needs config.json, a tokenizer and whole safetensors weights; .bin files are not read"
        raise CfkvError(f"model {source.name!r} cannot be loaded: {text[:300]} ({hint})") from error


def cache_folder() -> Path:
    """Where dequantised weights are kept."""
    own = os.environ.get("CFKV_CACHE")
    if own:
        return Path(own).expanduser()
    hub = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(hub).expanduser() / "cfkv"


def _dequantised(source: ModelSource) -> Path:
    """A folder with the GGUF file's weights as float32 safetensors, made on the first use."""
    file = Path(source.place)
    folder = cache_folder() / f"{file.stem}-{source.revision}"
    if (folder / "model.safetensors").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CfkvError(
            f"cannot make {folder.parent} for dequantised weights ({error.strerror}); set CFKV_CACHE"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise CfkvError(f"GGUF file {file} cannot be read: {' '.join(str(error).split())[:300]}") from error
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config  # the weights are dequantised; older loaders fail on it
    # The model that was read refuses to be saved, since it counts as quantised; a plain one takes its weights.
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tokenizer.save_pretrained(scratch)
        model.save_pretrained(scratch)
        made = Path(scratch) / "model"
        made.mkdir()
        for path in list(Path(scratch).iterdir()):
            if path != made:
                path.rename(made / path.name)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def layer_sizes(config: ModelConfig) -> tuple[int, int]:
    """Number of layers and of KV heads, from the configuration alone."""
    loaded = _pretrained(AutoConfig, _readable(resolve(config)), config).get_text_config()
    heads = getattr(loaded, "num_key_value_heads", None) or loaded.num_attention_heads
    return int(loaded.num_hidden_layers), int(heads)
