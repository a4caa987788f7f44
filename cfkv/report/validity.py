"""The section "Policies against labels": the tables that the commands print, as rows of a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from cfkv.analysis._carryover_stage import carryover_table
from cfkv.analysis.validity_summary import validity_tables
from cfkv.config import OfflineConfig

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class PlainTable:
    """A table as texts; the first column names the row."""

    title: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def validity_section(
    summary: pl.DataFrame, offline_online: pl.DataFrame, config: OfflineConfig
) -> list[PlainTable]:
    """One table per label kind and checkpoint, then validity against accuracy; empty without `validity_summary`.

    Parameters
    ----------
    summary, offline_online : DataFrame
        The tables `validity_summary` and `offline_online`, possibly without rows.
    config : OfflineConfig
        What the summary was made with.
    """
    if not summary.height:
        return []
    found = validity_tables(summary, config)
    if offline_online.height:
        found.append(carryover_table(offline_online))
    return [plain(table) for table in found]


def plain(table: Table) -> PlainTable:
    """The texts of a table made for a terminal."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return PlainTable(
        str(table.title or ""),
        " ".join(str(table.caption or "").split()),
        tuple(str(column.header) for column in table.columns),
        tuple(zip(*columns, strict=True)),
    )
