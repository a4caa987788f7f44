"""`cfkv.load`: a run's tables as lazy polars frames. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cfkv import store
from cfkv.errors import CfkvError, unknown_name
from cfkv.manifest import Manifest
from cfkv.schemas import SIGNALS, TABLES

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class TraceSignal(NamedTuple):
    """One signal of one trace: `values` [tokens, layers] and the layers of its columns."""

    values: np.ndarray
    layers: tuple[int | None, ...]


class RunTables:
    """The tables of a run directory; each attribute is a lazy frame over all its parts.

    Attributes: `traces`, `windows`, `token_labels`, `signals`, `probed`, `head_agreement`, `gate_signals`,
    `correlations`, `policy_validity`, `judged`, `validity_summary`, `evaluations`, `keep_sets`, and `manifest` (the
    content of run.json).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"RunTables({str(self.path)!r})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *TABLES]

    def __getattr__(self, name: str) -> pl.LazyFrame:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in TABLES:
            raise AttributeError(str(unknown_name("table", name, TABLES)))
        return store.scan(self.path, TABLES[name])

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of run.json."""
        return Manifest(self.path).read()

    def signal_groups(self) -> dict[str, list[str]]:
        """The signals of each group that was probed."""
        found = {}
        for group in store.partition_values(self.path, SIGNALS):
            for path in list(store.part_paths(self.path, SIGNALS, group).values())[:1]:
                names = pq.read_schema(path).names
                found[group] = [name for name in names if name not in SIGNALS.schema.names]
        return found

    def signal(self, name: str, *, layer: int | None = None) -> pl.DataFrame:
        """One signal as tidy rows: trace_id, layer, kv_head, position (index into token_ids), value.

        Parameters
        ----------
        name : str
            As in `signal_groups()`.
        layer : int, optional
            Only this layer (-1 = embedding output).

        Raises
        ------
        CfkvError
            If the run holds no such signal or layer; lists what it holds.
        """
        group = self._group_of(name)
        frame = store.scan(self.path, SIGNALS, group).select("trace_id", "layer", "kv_head", pl.col(name))
        if layer is not None:
            frame = frame.filter(pl.col("layer") == layer)
        rows = frame.drop_nulls(name).collect()
        if layer is not None and rows.is_empty():
            known = store.scan(self.path, SIGNALS, group).filter(pl.col(name).is_not_null())
            layers = known.select("layer").unique().sort("layer").collect()["layer"].to_list()
            raise CfkvError(f"signal {name!r} has no layer {layer}; its layers: {layers}")
        counted = rows.with_columns(position=pl.int_ranges(pl.col(name).list.len(), dtype=pl.Int32))
        tidy = counted.explode("position", name).rename({name: "value"})
        return tidy.select("trace_id", "layer", "kv_head", "position", "value")

    def signal_matrix(self, name: str, trace_id: str, *, kv_head: int = -1) -> TraceSignal:
        """One signal of one trace as an array [tokens, layers], a view of what Parquet decoded.

        Parameters
        ----------
        name : str
            As in `signal_groups()`.
        trace_id : str
            As in `traces`.
        kv_head : int
            A KV head that was kept with --per-head; -1 is the mean over them.

        Returns
        -------
        TraceSignal
            `values` [tokens, layers] (float32, read-only), and the `layers` of its columns: ascending, -1 the
            embedding output; `(None,)` for a signal without layers.

        Raises
        ------
        CfkvError
            If the run holds no such signal, trace or head.
        """
        group = self._group_of(name)
        for path in store.part_paths(self.path, SIGNALS, group).values():
            keys = store.read_part(path, SIGNALS, ["trace_id", "layer", "kv_head"])
            own = pc.and_(pc.equal(keys["trace_id"], trace_id), pc.equal(keys["kv_head"], kv_head))
            rows = np.flatnonzero(own.to_numpy())
            if len(rows) == 0:
                continue
            chunks = store.read_part(path, SIGNALS, [name])[name].chunks
            column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
            present = rows[column.is_valid().to_numpy(zero_copy_only=False)[rows]]
            if len(present):
                layers = keys["layer"].to_pylist()
                return TraceSignal(_matrix(column, present), tuple(layers[row] for row in present))
        raise CfkvError(
            f"signal {name!r} has no values for trace {trace_id!r} and kv_head {kv_head}; "
            "`probed` says what was probed, `signals` which heads were kept"
        )

    def _group_of(self, name: str) -> str:
        """The group that holds a signal."""
        groups = self.signal_groups()
        for group, names in groups.items():
            if name in names:
                return group
        raise unknown_name("signal", name, [known for names in groups.values() for known in names])


def _matrix(column: pa.ListArray, rows: np.ndarray) -> np.ndarray:
    """The lists of neighbouring rows as one array [tokens, rows]."""
    start, stop = column.offsets[rows[0]].as_py(), column.offsets[rows[-1] + 1].as_py()
    block = column.values.slice(start, stop - start).to_numpy(zero_copy_only=True)
    return block.reshape(len(rows), -1).T


def load(path_or_hub_id: str | Path) -> RunTables:
    """Open a run directory, or a released dataset on the hub (`org/name`), as lazy tables.

    Examples
    --------
    >>> run = cfkv.load("runs/quickstart")  # doctest: +SKIP
    >>> run.token_labels.collect()  # doctest: +SKIP
    >>> run.signal("hidden_diff", layer=2)  # doctest: +SKIP

    Raises
    ------
    CfkvError
        If the place is no run directory, or holds a newer schema.
    """
    path = Path(path_or_hub_id).expanduser()
    if not path.exists() and HUB_ID.fullmatch(str(path_or_hub_id)):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

        try:
            path = Path(snapshot_download(str(path_or_hub_id), repo_type="dataset"))
        except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
            raise CfkvError(
                f"{str(path_or_hub_id)!r} is no local run directory, and the hub gave: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
    if not path.is_dir() or not any((path / name).is_dir() for name in TABLES):
        raise CfkvError(
            f"{str(path_or_hub_id)!r} is no run directory: it should be a folder that holds "
            f"{', '.join(f'{name}/' for name in TABLES)}"
        )
    return RunTables(path)
