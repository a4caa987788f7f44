"""On which layers and KV heads cached entries are hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cfkv.errors import CfkvError
from cfkv.models import compat
from cfkv.models.loading import ModelShape

ALL = "all"


@dataclass(frozen=True)
class Scope:
    """Layers and KV heads on which an intervention acts; `name` is the tables' `scope` column."""

    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    name: str

    @property
    def everywhere(self) -> bool:
        """Whether it acts on the whole cache."""
        return self.name == ALL

    @classmethod
    def parse(cls, layers: str, kv_heads: str, shape: ModelShape) -> Scope:
        """Read `--layers` and `--kv-heads`: all, or indices and ranges such as 4-11 or 0,2.

        Raises
        ------
        CfkvError
            For what is neither, or beyond the model's layers or KV heads.
        """
        parts = [
            f"{word} {text}" for word, text in (("layers", layers), ("kv_heads", kv_heads)) if text != ALL
        ]
        return cls(
            _indices("--layers", layers, shape.num_layers, "layers"),
            _indices("--kv-heads", kv_heads, shape.num_kv_heads, "KV heads"),
            ", ".join(parts) or ALL,
        )

    def masks(
        self, plain: compat.Mask, hiding: compat.Mask, shape: ModelShape
    ) -> tuple[compat.Mask, dict[int, compat.Mask]]:
        """The mask of all layers, and the masks of the layers that differ from it.

        `plain` hides nothing, `hiding` hides the entries: [1, 1, queries, keys] each, or one per layer type.
        """
        if self.everywhere:
            return hiding, {}
        group = shape.num_heads // shape.num_kv_heads
        inside = torch.zeros(shape.num_heads, dtype=torch.bool)
        for head in self.kv_heads:
            inside[head * group : (head + 1) * group] = True

        def by_head(hidden: Tensor, shown: Tensor) -> Tensor:
            chosen = inside.to(hidden.device)[None, :, None, None]
            return hidden if bool(inside.all()) else torch.where(chosen, hidden, shown)

        if isinstance(hiding, dict) and isinstance(plain, dict):
            mixed: compat.Mask = {kind: by_head(hiding[kind], plain[kind]) for kind in hiding}
        else:
            mixed = by_head(hiding, plain)  # type: ignore[arg-type]
        return plain, dict.fromkeys(self.layers, mixed)


def _indices(flag: str, text: str, count: int, what: str) -> tuple[int, ...]:
    if text == ALL:
        return tuple(range(count))
    found: set[int] = set()
    for piece in text.split(","):
        low, dash, high = piece.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise CfkvError(
                f"{flag} {text!r}: {piece!r} is no index or range; legal are all, 4-11, or 0,2,5-7"
            )
        first, last = int(low), int(high or low)
        if not first <= last < count:
            raise CfkvError(
                f"{flag} {text!r}: {piece.strip()} is not within this model's {what} 0-{count - 1}"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))
