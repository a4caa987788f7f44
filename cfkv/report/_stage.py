"""`cfkv report`: tables in, figures, report.html and the dataset card out."""

from __future__ import annotations

from pathlib import Path

from cfkv import store
from cfkv.analysis._stage import recorded_config
from cfkv.analysis.high_damage import graded_kinds
from cfkv.config import CorrelateConfig, ReportConfig
from cfkv.manifest import write_text
from cfkv.report.card import dataset_card
from cfkv.report.figures import figures_svg, write_figures
from cfkv.report.html import render_report
from cfkv.report.policies import policy_results
from cfkv.report.validity import validity_section
from cfkv.schemas import (
    CORRELATIONS,
    EVALUATIONS,
    EVICTION_KL,
    OFFLINE_ONLINE,
    PROBED,
    TOKEN_LABELS,
    TRACES,
    VALIDITY_SUMMARY,
    WINDOWS,
)
from cfkv.stage import Run


def run_report(run: Run, config: ReportConfig) -> Path:
    """Write RUN/figures, RUN/report.html and RUN/README.md from the tables; returns the report's path."""
    for name in ("correlate", *run.require("correlate")["identity"]["upstream"]):
        run.wait_for(name, patient=False)
    for name in run.manifest.read()["stages"]:
        if name.startswith("evaluate online"):  # half of an evaluation would look like all of it
            run.wait_for(name, patient=False)
    correlations = store.collect(run.path, CORRELATIONS)
    manifest = run.manifest.read()
    traces = store.collect(run.path, TRACES)
    token_labels = store.collect(run.path, TOKEN_LABELS)
    graded = graded_kinds(token_labels)
    asked = recorded_config(run) or CorrelateConfig()
    policies = policy_results(store.collect(run.path, EVALUATIONS))
    accuracy = policies.accuracy if policies else None
    write_figures(correlations, run.path / "figures", graded=graded, accuracy=accuracy)
    page = render_report(
        title=f"cfkv: {run.path.resolve().name}",
        manifest=manifest,
        traces=traces,
        windows=store.collect(run.path, WINDOWS),
        eviction_kl=store.collect(run.path, EVICTION_KL),
        token_labels=token_labels,
        probed=store.collect(run.path, PROBED),
        correlations=correlations,
        config=config,
        figures_svg=figures_svg(correlations, graded=graded, accuracy=accuracy),
        high_damage=asked.high_damage,
        policies=policies,
        validity=validity_section(
            store.collect(run.path, VALIDITY_SUMMARY),
            store.collect(run.path, OFFLINE_ONLINE),
            run.manifest.recipe().offline,
        ),
    )
    path = run.path / "report.html"
    write_text(path, page)
    write_text(run.path / "README.md", dataset_card(run.path, manifest, traces))
    run.manifest.record_config("report", config)
    return path
