"""report.html: one self-contained page (inline SVG and style, no scripts, nothing from the net)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from cfkv.analysis.floor import floor_facts, recorded_dtype
from cfkv.analysis.high_damage import graded_kinds, with_high_damage
from cfkv.analysis.summary import label_counts
from cfkv.config import ReportConfig, canonical_json
from cfkv.report.counts import count_removals, count_traces, count_windows, failure_rows, label_kinds
from cfkv.report.meanings import MEANINGS, Wording, wording
from cfkv.report.policies import PolicyResults, arms_in_words, policy_sections
from cfkv.report.svg import inline_svg
from cfkv.report.tables import TOP_ROWS, correlation_table, significance_sentence
from cfkv.report.text import MEASURES, count, number, percent, slug, span
from cfkv.report.tokens import choose_traces, tokens_html
from cfkv.report.validity import PlainTable

MAX_FAILURES = 200


def render_report(
    *,
    title: str,
    manifest: dict[str, Any],
    traces: pl.DataFrame,
    windows: pl.DataFrame,
    eviction_kl: pl.DataFrame,
    token_labels: pl.DataFrame,
    probed: pl.DataFrame,
    correlations: pl.DataFrame,
    config: ReportConfig,
    figures_svg: dict[str, str],
    high_damage: float = 0.1,
    policies: PolicyResults | None = None,
    validity: Sequence[PlainTable] = (),
) -> str:
    """The report of a run as the text of one HTML page.

    Parameters
    ----------
    title : str
        Heading of the page.
    manifest : dict
        Content of run.json; what it lacks is left out.
    traces, windows, eviction_kl, token_labels, probed, correlations : DataFrame
        The run's tables (cfkv.schemas), each possibly without rows.
    config : ReportConfig
        How many traces are shown.
    figures_svg : dict
        SVG texts by name, `bands-KIND`, `auroc-KIND`, `accuracy-MODE`, from `cfkv.report.figures.figures_svg`.
    high_damage : float
        The share of a trace that the correlations call high damage, for kinds that store a value alone.
    policies : PolicyResults, optional
        What was evaluated; without it the page has no section of policies.
    validity : sequence of PlainTable
        From `cfkv.report.validity.validity_section`; without them the page has no such section.

    Raises
    ------
    CfkvError
        If the token lists of a trace and of its labels do not fit each other.
    """
    import jinja2

    kinds = label_kinds(token_labels, windows, correlations)
    stages = manifest.get("stages") or {}
    evaluations = policies.evaluations if policies else None
    failures = failure_rows(traces, windows, token_labels, probed, evaluations)
    plots = {
        name: inline_svg(svg, f"fig-{slug(name)}", f"Figure {name}; its values are in the table below")
        for name, svg in figures_svg.items()
    }
    graded = graded_kinds(token_labels)
    decided = with_high_damage(token_labels, traces, high_damage)
    sections = [
        _section(
            kind,
            wording(kind, graded=kind in graded, share=high_damage),
            traces,
            decided,
            windows,
            eviction_kl,
            correlations,
            config,
            plots,
            stages,
        )
        for kind in kinds
    ]
    used = {name for kind in kinds for name in (f"bands-{slug(kind)}", f"auroc-{slug(kind)}")}
    policy_parts = policy_sections(policies, plots) if policies else []
    used |= {f"accuracy-{part['id']}" for part in policy_parts}
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = Path(__file__).with_name("template.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=title,
        facts=_facts(manifest, traces, windows, correlations, kinds),
        traces=count_traces(traces),
        probed=[
            (group, rows.filter(pl.col("status") == "ok").height, rows.height)
            for (group,), rows in probed.group_by("group", maintain_order=True)
        ],
        sections=sections,
        policies=policy_parts,
        validity=validity,
        arms=arms_in_words(policies) if policies else "",
        other_plots={name: svg for name, svg in plots.items() if name not in used},
        measures=list(MEASURES.values()),
        top_rows=TOP_ROWS,
        failures=failures[:MAX_FAILURES],
        failures_left_out=len(failures) - len(failures[:MAX_FAILURES]),
        weights=_distinct(traces, "weights"),
        stages=[_stage(name, record) for name, record in stages.items()],
        manifest_version=manifest.get("cfkv_version"),
        count=count,
        percent=percent,
        number=number,
    )


def _section(
    kind: str,
    words: Wording,
    traces: pl.DataFrame,
    token_labels: pl.DataFrame,
    windows: pl.DataFrame,
    eviction_kl: pl.DataFrame,
    correlations: pl.DataFrame,
    config: ReportConfig,
    plots: Mapping[str, str],
    stages: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that the page says about one label kind."""
    rows = correlations.filter(pl.col("kind") == kind)
    labelled = kind in label_kinds(token_labels, windows)
    levels = rows["level"].fill_nan(None).drop_nulls()
    return {
        "kind": kind,
        "id": slug(kind),
        "meaning": MEANINGS.get(kind),
        "labels": label_counts(traces, token_labels, windows, kind) if labelled else None,
        "windows": count_windows(windows, kind),
        "removals": count_removals(eviction_kl, kind),
        "floor": floor_facts(
            kind, windows, eviction_kl, _find_config(stages, kind), dtype=recorded_dtype(stages, kind)
        ),
        "words": words,
        "bands": plots.get(f"bands-{slug(kind)}"),
        "auroc": plots.get(f"auroc-{slug(kind)}"),
        "level": f"{100 * levels[0]:.0f} %" if len(levels) else "",
        "tests": significance_sentence(correlations, kind),
        "top": correlation_table(correlations, kind, top=TOP_ROWS),
        "full": correlation_table(correlations, kind),
        "traces": _shown(kind, words, traces, token_labels, config.traces),
    }


def _shown(
    kind: str, words: Wording, traces: pl.DataFrame, token_labels: pl.DataFrame, wanted: int
) -> list[dict[str, Any]]:
    labels = {row["trace_id"]: row for row in token_labels.filter(pl.col("kind") == kind).to_dicts()}
    shown = []
    for trace_id in choose_traces(traces, token_labels, kind, wanted):
        row = traces.filter(pl.col("trace_id") == trace_id).row(0, named=True)
        label = labels.get(trace_id)
        flags = [flag for flag in (label["importance"] if label else None) or [] if flag >= 0]
        facts = [
            ("problem", row["problem_id"]),
            ("tokens", len(row["token_ids"])),
            ("answer", _quoted(row["answer"])),
            ("reference", _quoted(row["reference_answer"])),
            ("finished by", row["finish_reason"]),
        ]
        if label is None:
            facts.append(("labels", "none"))
        else:
            facts.append(("labels", label["status"]))
            if label["status"] == "labelled" and label["control_agrees"] is None:  # it regenerates no answer
                facts.append(("removals", count(label["n_windows"] or 0)))
            else:
                facts += [
                    ("answer from the unmodified context", _quoted(label["control_answer"])),
                    ("windows flipped", f"{label['n_flipped'] or 0} of {label['n_windows'] or 0}"),
                ]
            told = f"{sum(flags)} of {len(flags)} tokens ({percent(sum(flags), len(flags))})"
            facts.append((words.positive, told))
        shown.append({"id": trace_id, "facts": facts, "tokens": tokens_html(row, label, words=words)})
    return shown


def _quoted(text: str | None) -> str:
    return "none" if text is None else f"“{text}”"


def _distinct(frame: pl.DataFrame, column: str) -> str:
    return ", ".join(str(value) for value in frame[column].drop_nulls().unique(maintain_order=True))


def _facts(
    manifest: Mapping[str, Any],
    traces: pl.DataFrame,
    windows: pl.DataFrame,
    correlations: pl.DataFrame,
    kinds: list[str],
) -> list[tuple[str, str]]:
    """What was run, as pairs of name and text; facts that nothing tells are left out."""
    stages = manifest.get("stages") or {}
    revision = _distinct(traces, "model_revision")
    facts = [
        ("Model", _distinct(traces, "model") + (f" (revision {revision})" if revision else "")),
        ("Weights", _distinct(traces, "weights")),
        ("Dataset", _distinct(traces, "dataset")),
        ("Trace boundary", _distinct(traces, "boundary")),
    ]
    for kind in kinds:
        settings = _find_config(stages, kind)
        told = [f"{name} {value}" for name, value in settings.items() if name != "kind"]
        ids = windows.filter(pl.col("kind") == kind)["replacement_id"].drop_nulls().unique().sort()
        told += [f"replacement token id {', '.join(map(str, ids))}"] if len(ids) else []
        facts.append((f"Labels: {kind}", ", ".join(told)))
    if len(correlations):
        blocks = correlations["layer"].drop_nulls()
        facts.append(("Signals", _distinct(correlations, "signal")))
        facts.append(
            ("Layers", f"{span(blocks.filter(blocks >= 0))}{', emb' if (blocks == -1).any() else ''}")
        )
        facts.append(("Smoothings", _distinct(correlations, "smoothing")))
    return [(name, text) for name, text in facts if text]


def _find_config(value: Any, kind: str) -> Mapping[str, Any]:
    """The label configuration of `kind` anywhere inside the manifest's stages; empty if there is none."""
    if isinstance(value, Mapping):
        if value.get("kind") == kind and "window" in value:
            return value
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            if found := _find_config(entry, kind):
                return found
    return {}


def _stage(name: str, record: Any) -> dict[str, Any]:
    """One stage of run.json, made ready to print."""
    import yaml

    record = record if isinstance(record, Mapping) else {}
    facts = [(key, record.get(key)) for key in ("fingerprint", "started", "finished")]
    facts += [(key, _flat(record.get(key))) for key in ("model", "versions")]
    checks = record.get("self_check") or []
    checks = checks if isinstance(checks, list) else [checks]
    config = record.get("config")
    return {
        "name": name,
        "facts": [(key, value) for key, value in facts if value],
        "checks": [_flat(check) for check in checks],
        "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else "",
    }


def _flat(value: Any) -> str:
    """A JSON value in one line: `name value, name value` for a mapping."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(entry)}" for key, entry in value.items())
    if value is None or isinstance(value, str):
        return value or ""
    return canonical_json(value)
