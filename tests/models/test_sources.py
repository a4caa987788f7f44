"""Where models come from: clear refusals, a saved folder that loads, a revision that follows the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cfkv.config import Execution, ModelConfig
from cfkv.errors import CfkvError
from cfkv.models.loading import LoadedModel, layer_sizes, load_model, load_tokenizer
from cfkv.models.sources import builtin_folder, resolve


@pytest.fixture
def saved(llama: LoadedModel, tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    llama.model.save_pretrained(folder)
    llama.tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder)), Execution(device="cpu"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bultin", "unknown model 'bultin': did you mean 'builtin'"),
        ("smollm", "did you mean 'smollm2'"),
        ("nonsense", "legal: builtin, smollm2; or a hub id"),
        ("./missing", r"unknown model './missing'"),
        ("/missing/folder", r"unknown model '/missing/folder'"),
        ("~/missing/folder", "unknown model"),
        ("~nobody-of-this-name/folder", "unknown model"),
        ("a/b/c", "unknown model"),
        ("missing.gguf", "model file 'missing.gguf' does not exist"),
        ("/missing/model.gguf", "does not exist"),
    ],
)
def test_refused_names(name: str, message: str) -> None:
    with pytest.raises(CfkvError, match=message):
        resolve(ModelConfig(model=name))


def test_hub_id_is_taken_as_it_is() -> None:
    source = resolve(ModelConfig(model="org/name", revision="abc"))
    assert (source.kind, source.place, source.revision) == ("hub", "org/name", "abc")


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CfkvError, match="no config.json"):
        resolve(ModelConfig(model=str(tmp_path)))


def test_builtin_is_resolved() -> None:
    source = resolve(ModelConfig())
    assert source.kind == "folder"
    assert Path(source.place) == builtin_folder()
    assert layer_sizes(ModelConfig()) == (4, 2)


def test_saved_folder_loads(saved: Path, llama: LoadedModel) -> None:
    loaded = load(saved)
    assert loaded.name == str(saved)
    assert loaded.shape == llama.shape
    assert loaded.end_ids == llama.end_ids
    assert loaded.weights == "float32"
    assert loaded.dtype == torch.float32
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    ids = torch.arange(9, 30)[None]
    assert torch.equal(loaded.model(ids).logits, llama.model(ids).logits)
    assert load_tokenizer(ModelConfig(model=str(saved))).decode([5, 9]) == "<think> 0"
    assert layer_sizes(ModelConfig(model=str(saved)))[0] == llama.shape.num_layers


def test_only_a_pickle_is_refused(saved: Path) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(
        CfkvError, match="cannot be loaded.*whole safetensors weights; .bin files are not read"
    ):
        load(saved)


def test_broken_config_is_one_message(saved: Path) -> None:
    (saved / "config.json").write_text('{"model_type": "unheard_of"}', encoding="utf-8")
    with pytest.raises(CfkvError, match="cannot be loaded"):
        load(saved)


def test_revision_follows_the_weights_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    def revision(folder: Path) -> str | None:
        return resolve(ModelConfig(model=str(folder))).revision

    first = revision(saved)
    copy = tmp_path / "elsewhere"
    shutil.copytree(saved, copy)
    assert revision(copy) == first == load(copy).revision
    (copy / "README.md").write_text("words", encoding="utf-8")
    assert revision(copy) == first
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert revision(copy) != first
    shutil.copytree(saved, copy, dirs_exist_ok=True)
    assert revision(copy) == first
    text = (copy / "config.json").read_text(encoding="utf-8")
    (copy / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'), "utf-8")
    assert revision(copy) != first


def test_compute_dtype_and_kernel_are_followed(saved: Path) -> None:
    config = ModelConfig(model=str(saved), dtype="bfloat16", attn_implementation="eager")
    loaded = load_model(config, Execution(device="cpu"))
    assert (loaded.dtype, loaded.attn_implementation) == (torch.bfloat16, "eager")
    assert loaded.weights == "float32"
