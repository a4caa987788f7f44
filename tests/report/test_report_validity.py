"""The section of policies against labels: texts of the printed tables, escaped, and absent without them."""

from __future__ import annotations

import polars as pl
from rich.table import Table
from test_report_html import check, render

from cfkv import schemas
from cfkv.config import OfflineConfig
from cfkv.report.validity import PlainTable, plain, validity_section


def test_plain_by_hand() -> None:
    table = Table(title="A title", caption="one\n  two")
    table.add_column("policy")
    table.add_column("AUROC")
    table.add_row("h2o", ".61")
    table.add_row("tova", "-")
    assert plain(table) == PlainTable(
        "A title", "one two", ("policy", "AUROC"), (("h2o", ".61"), ("tova", "-"))
    )


def test_section() -> None:
    assert 'id="validity"' not in render()
    table = PlainTable("Scores", "A <caption>", ("policy", "rho"), (("<mine>", "+.20"),))
    page = render(validity=[table])
    check(page)
    assert "#validity" in page
    assert "&lt;mine&gt;" in page
    assert "A &lt;caption&gt;" in page
    assert page.count("+.20") == 1


def test_empty_without_a_summary() -> None:

    empty = {
        name: pl.DataFrame(pl.from_arrow(schemas.TABLES[name].schema.empty_table()))
        for name in ("validity_summary", "offline_online")
    }
    assert validity_section(empty["validity_summary"], empty["offline_online"], OfflineConfig()) == []
