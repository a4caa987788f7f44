"""Counterfactual importance labels, streaming signals and honest statistics for KV-cache eviction."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cfkv.loader import RunTables, load

__all__ = ["RunTables", "__version__", "load"]


def _version() -> str:
    try:
        return version("cfkv")
    except PackageNotFoundError:
        return "0+unknown"


__version__ = _version()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Loading tables needs polars; importing cfkv does not.
    if name in ("load", "RunTables"):
        from cfkv import loader

        return getattr(loader, name)
    raise AttributeError(f"module 'cfkv' has no attribute {name!r}")
