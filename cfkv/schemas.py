"""Every table that cfkv writes: columns, key, version. Nothing else in the project declares a column.

Readers refuse a newer version and migrate an older one through `MIGRATIONS`. The footer of each part repeats
`<table>/<version>` and the fingerprint of the stage that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from cfkv.errors import CfkvError

SCHEMA_KEY = b"cfkv.schema"
FINGERPRINT_KEY = b"cfkv.fingerprint"

# Statuses of rows that did not fail. `skipped`: left out on request. `excluded`: the control disagrees.
NOT_FAILURES = frozenset({"ok", "labelled", "excluded", "skipped"})


@dataclass(frozen=True)
class Table:
    """One table: `key` columns are unique over all its rows; `open_columns` may be added by a registry.

    `partition` names the folder level below the table (`kind` or `group`) or is None.
    `mantissa_bits` is the precision to which float list columns are rounded before writing (None: exact).
    """

    name: str
    version: int
    schema: pa.Schema
    key: tuple[str, ...]
    partition: str | None = None
    open_columns: bool = False
    mantissa_bits: int | None = None


def _columns(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in types.items()])


STRING, INT, FLOAT, BOOL = pa.string(), pa.int32(), pa.float32(), pa.bool_()

TRACES = Table(
    "traces",
    1,
    _columns(
        trace_id=STRING,
        dataset=STRING,
        problem_id=STRING,
        sample_index=INT,
        model=STRING,
        model_revision=STRING,
        weights=STRING,  # dtype or quantisation that the weights were released in
        token_ids=pa.list_(INT),  # prompt, reasoning and answer, as fed to the model
        token_texts=pa.list_(STRING),  # for display only: token ids are the truth
        prompt_len=INT,
        reasoning_start=INT,
        reasoning_stop=INT,
        answer_start=INT,  # token_ids[:answer_start] is the context of a regeneration
        answer_stop=INT,  # one past the token that closes the first boxed answer, or len(token_ids)
        boundary=STRING,  # rule that found reasoning_stop: think_end, boxed, tail, given
        answer_prefix=STRING,  # text between the boundary and answer_start
        logprobs=pa.list_(FLOAT),  # nats, one per token of token_ids[prompt_len:]
        output_text=STRING,
        reference_answer=STRING,
        answer=STRING,
        correct=BOOL,
        finish_reason=STRING,  # stop, length, boxed, imported
        status=STRING,  # ok or the name of a failure
        reason=STRING,
    ),
    key=("trace_id",),
)

WINDOWS = Table(
    "windows",
    1,
    _columns(
        trace_id=STRING,
        kind=STRING,
        scope=STRING,  # layers and KV heads acted on: all, or such as 'layers 4-11, kv_heads 0'
        window_index=INT,
        start=INT,  # indices into token_ids, stop exclusive
        stop=INT,
        replacement_id=INT,
        answer=STRING,
        answered=BOOL,  # a complete boxed answer was found
        flipped=BOOL,
        delta_nll=FLOAT,  # nats/token of the trace's own answer, positive = the intervention hurts
        min_margin=FLOAT,  # smallest top-1 minus top-2 logit over the decoded tokens
        accepted_draft=INT,  # leading tokens of the original answer that greedy decoding repeats
        decoded=INT,  # tokens decoded one at a time
        status=STRING,
        reason=STRING,
    ),
    key=("trace_id", "kind", "scope", "window_index"),
    partition="kind",
)

BLOCK = pa.struct([pa.field("start", INT), pa.field("stop", INT)])

EVICTION_KL = Table(
    "eviction_kl",
    2,
    _columns(
        trace_id=STRING,
        kind=STRING,
        scope=STRING,  # layers and KV heads acted on: all, or such as 'layers 4-11, kv_heads 0'
        step=INT,  # cached tokens when the replay begins; token_ids[step : step + horizon] are replayed
        block_index=INT,
        blocks=pa.list_(BLOCK),  # what was removed: one block, or a pair; indices into token_ids
        kl=FLOAT,  # nats, mean over the horizon of KL(with || without)
        kl_by_offset=pa.list_(FLOAT),
        null_kl=FLOAT,  # the same with nothing removed: the floor of this step
        synergy=FLOAT,  # nats, of a pair: kl minus the kl of both blocks removed alone
    ),
    key=("trace_id", "kind", "scope", "step", "block_index"),
    partition="kind",
)

TOKEN_LABELS = Table(
    "token_labels",
    1,
    _columns(
        trace_id=STRING,
        problem_id=STRING,
        kind=STRING,
        importance=pa.list_(pa.int8()),  # one per token of token_ids: -1 untested (prompt, answer), 0, 1
        value=pa.list_(
            FLOAT
        ),  # mean over the covering windows or blocks (the kind's unit), NaN where untested
        control_answer=STRING,  # regenerated from the unmodified context
        control_agrees=BOOL,
        n_windows=INT,
        n_flipped=INT,
        status=STRING,  # labelled, excluded (the control disagrees), failed
        reason=STRING,
    ),
    key=("trace_id", "kind"),
    partition="kind",
)

SIGNALS = Table(
    "signals",
    1,
    _columns(
        trace_id=STRING,
        layer=pa.int16(),  # block 0..L-1, embedding output -1
        kv_head=pa.int16(),  # -1 = mean over KV heads, or a signal without heads
    ),  # and one list<float32> per signal of the group, from the registry
    key=("trace_id", "layer", "kv_head"),
    partition="group",
    open_columns=True,
    mantissa_bits=16,
)

PROBED = Table(
    "probed",
    1,
    _columns(trace_id=STRING, group=STRING, n_tokens=INT, status=STRING, reason=STRING),
    key=("trace_id", "group"),
    partition="group",
)

HEAD_AGREEMENT = Table(
    "head_agreement",
    1,
    _columns(
        trace_id=STRING,
        input=STRING,  # tokens measured: prompt, context (all before the answer), trace
        layer=pa.int16(),
        agreement=FLOAT,  # mean Jaccard index of the heads' top sets over pairs of heads
        n_pairs=INT,
    ),
    key=("trace_id", "input", "layer"),
)

GATE_SIGNALS = Table(
    "gate_signals",
    1,
    _columns(
        trace_id=STRING,
        input=STRING,
        n_tokens=INT,
        top=INT,  # size of a head's set
        queries=INT,  # last rows whose attention is averaged
        drop=FLOAT,  # agreement of early less late layers, bins of equal size
        drop_strict=FLOAT,  # the late bin from floor((bins - 1) L / bins) on
        entropy=FLOAT,  # of the mean row over log n_tokens, mean over layers and heads
        top_mass=FLOAT,  # attention mass of the top set, mean over layers and heads
        max_share=FLOAT,  # largest weight of the mean row, mean over layers and heads
        key_norm_spread=FLOAT,  # standard deviation over mean of key norms, mean over layers and KV heads
        entropy_drop=FLOAT,  # entropy of early less late layers, bins of equal size
        floor=FLOAT,  # agreement of random sets, top / (2 n_tokens - top)
        status=STRING,
        reason=STRING,
    ),
    key=("trace_id", "input"),
)

CORRELATIONS = Table(
    "correlations",
    1,
    _columns(
        kind=STRING,
        signal=STRING,
        layer=pa.int16(),
        smoothing=STRING,  # raw, ema, rolling_mean, rolling_z
        control=STRING,  # none
        # against the 0/1 label: spearman_pooled, spearman_within, auroc; against the kind's graded value:
        # spearman_value_pooled, spearman_value_within
        measure=STRING,
        estimate=pa.float64(),
        low=pa.float64(),
        high=pa.float64(),
        level=pa.float64(),
        pvalue=pa.float64(),
        adjusted_pvalue=pa.float64(),  # Benjamini-Hochberg within kind and measure
        n_traces=INT,
        n_tokens=INT,
        n_important=INT,
        nan_reason=STRING,
    ),
    key=("kind", "signal", "layer", "smoothing", "control", "measure"),
)

POLICY_VALIDITY = Table(
    "policy_validity",
    1,
    _columns(
        policy=STRING,  # name with the parameters that differ from the defaults, such as h2o:recent_share=0.25
        kind=STRING,
        trace_id=STRING,
        problem_id=STRING,
        checkpoint=STRING,  # end: the last token before the answer; 50%: that share of the reasoning
        step=INT,  # tokens cached when the policy scored them
        # of the score: rho, rho_value, auroc, average_precision, ndcg; of keep sets: recall, overlap, regret
        measure=STRING,
        share=pa.float64(),  # kept share of the candidates; null for measures of the score
        value=pa.float64(),
        n_candidates=INT,  # tested tokens among those cached
        n_important=INT,
        nan_reason=STRING,
    ),
    key=("policy", "kind", "trace_id", "checkpoint", "measure", "share"),
    partition="policy",
)

JUDGED = Table(
    "judged",
    1,
    _columns(trace_id=STRING, policy=STRING, n_tokens=INT, status=STRING, reason=STRING),
    key=("trace_id", "policy"),
    partition="policy",
)

VALIDITY_SUMMARY = Table(
    "validity_summary",
    1,
    _columns(
        policy=STRING,
        kind=STRING,
        checkpoint=STRING,
        measure=STRING,
        share=pa.float64(),
        versus=STRING,  # null: the measure itself; random, position: its paired difference from that policy
        estimate=pa.float64(),
        low=pa.float64(),
        high=pa.float64(),
        level=pa.float64(),
        pvalue=pa.float64(),  # of differences alone: against 0
        adjusted_pvalue=pa.float64(),  # over the policies of one kind, checkpoint, measure, share and versus
        n_policies=INT,  # how many tests that are
        n_traces=INT,
        n_problems=INT,
        n_dropped=INT,  # traces without a value
        n_candidates=INT,  # of the traces that count
        n_important=INT,
        nan_reason=STRING,  # of what is NaN: the estimate, or the interval alone
    ),
    key=("policy", "kind", "checkpoint", "measure", "share", "versus"),
)

EVALUATIONS = Table(
    "evaluations",
    1,
    _columns(
        trace_id=STRING,
        problem_id=STRING,
        arm=STRING,  # mode, policy with its parameters, budget, such as forced-h2o@recent_share=0.25-25pct
        policy=STRING,
        parameters=STRING,  # those that differ from the defaults, such as recent_share=0.25; "" if none
        budget=STRING,  # as asked: 512, 25%, 50%prompt, 64MiB
        slots=INT,  # the same in tokens per KV head, all protected ones included; null: no eviction
        mode=STRING,  # forced: the trace's own reasoning is fed; free: the model writes all
        positions=STRING,  # absolute, compact, slot
        sample_index=INT,
        eviction=STRING,  # physical, or simulated: masked, so that seconds and bytes tell nothing; none
        answer=STRING,
        correct=BOOL,
        answered=BOOL,  # a complete boxed answer was found
        verdict=STRING,  # of the grader: correct, wrong, unanswered, timeout
        finish_reason=STRING,  # boxed, stop, length
        n_read=INT,  # tokens that were fed: prompt, and in forced mode the reasoning
        n_tokens=INT,  # tokens that were generated
        n_steps=INT,  # tokens that were fed one at a time, generated or of the trace: those that the seconds are of
        kept_mean=FLOAT,  # cached tokens per KV head, mean over those steps, layers and heads
        kept_peak=FLOAT,  # the largest such number of a step
        evictions=INT,  # steps at which something was evicted
        evicted=FLOAT,  # tokens per KV head that were evicted
        min_margin=FLOAT,  # smallest top-1 minus top-2 logit over the generated tokens
        seconds=FLOAT,  # of this row after what was read at once: its share of the forwards, and its policy's own
        peak_bytes=pa.int64(),  # of its cache: keys and values of all slots; null where simulated
        token_ids=pa.list_(INT),  # what was generated
        status=STRING,
        reason=STRING,
    ),
    key=("trace_id", "arm", "sample_index"),
    partition="arm",
)

KEEP_SETS = Table(
    "keep_sets",
    1,
    _columns(
        trace_id=STRING,
        arm=STRING,
        sample_index=INT,
        layer=pa.int16(),  # -1 where all layers share a keep set
        kv_head=pa.int16(),  # -1 where all KV heads of the layer share it
        step=INT,  # tokens seen so far
        kept=pa.list_(INT),  # positions that are left after the eviction, ascending
    ),
    key=("trace_id", "arm", "sample_index", "layer", "kv_head", "step"),
    partition="arm",
)

DOUBLE = pa.float64()

POLICY_ACCURACY = Table(
    "policy_accuracy",
    1,
    _columns(
        mode=STRING,
        policy=STRING,
        parameters=STRING,
        positions=STRING,
        budget=STRING,  # as asked; `all` of the full cache
        eviction=STRING,  # physical, simulated, none, or mixed: physical and simulated rows
        slots_mean=DOUBLE,  # tokens per KV head, mean over rows; NaN where nothing is evicted
        n_rows=INT,  # n_graded + n_failed + n_ungraded
        n_graded=INT,
        n_failed=INT,  # rows whose status is a failure
        n_ungraded=INT,  # rows that did not fail and have no verdict: skipped, no reference
        n_items=INT,  # traces with a graded row
        n_problems=INT,  # of those traces
        accuracy=DOUBLE,  # of the graded rows
        low=DOUBLE,
        high=DOUBLE,
        level=DOUBLE,
        method=STRING,  # of the interval: wilson, bootstrap (over problems), none
        n_completed=INT,  # graded rows that did not stop at the cap
        accuracy_completed=DOUBLE,
        n_ran=INT,  # rows that were run to their end, graded or not; what follows is of those
        n_capped=INT,  # finish_reason length
        cap_rate=DOUBLE,
        n_unanswered=INT,
        unanswered_rate=DOUBLE,
        n_timeouts=INT,  # of the grader
        kept_mean=DOUBLE,  # cached tokens per KV head, mean over rows of the mean over steps
        kept_peak=DOUBLE,  # largest of all rows
        evictions=DOUBLE,  # steps with an eviction, mean over rows
        evicted=DOUBLE,  # tokens per KV head, mean over rows
        seconds_per_token=DOUBLE,  # of the tokens that were fed one at a time
        peak_bytes=pa.int64(),  # largest of all rows; null where a row is simulated
        nan_reason=STRING,
        cost_reason=STRING,  # why there are no seconds or bytes
    ),
    key=("mode", "policy", "parameters", "positions", "budget"),
)

POLICY_COMPARISONS = Table(
    "policy_comparisons",
    1,
    _columns(
        mode=STRING,
        policy=STRING,
        parameters=STRING,
        positions=STRING,
        budget=STRING,
        against=STRING,  # full (budget all) or random (same budget and positions), of the same mode
        n_items=INT,  # traces that were graded in both arms
        n_problems=INT,
        n_dropped=INT,  # traces of both arms that failed, or have no verdict, in either
        n_unshared=INT,  # traces of one arm alone
        accuracy=DOUBLE,  # over n_items, a trace being its mean over samples
        accuracy_against=DOUBLE,
        difference=DOUBLE,  # positive = the policy is better
        low=DOUBLE,
        high=DOUBLE,
        level=DOUBLE,
        wins=INT,  # traces on which the policy is better
        losses=INT,
        ties=INT,
        mcnemar_pvalue=DOUBLE,  # exact, two-sided
        mcnemar_reason=STRING,  # why there is none
        bootstrap_pvalue=DOUBLE,
        test=STRING,  # which of the two pvalue is: mcnemar, bootstrap, none
        pvalue=DOUBLE,
        adjusted_pvalue=DOUBLE,  # over the policies of one mode, positions, budget and against
        correction=STRING,  # holm, benjamini_hochberg
        n_tests=INT,  # that were adjusted together
        nan_reason=STRING,
    ),
    key=("mode", "policy", "parameters", "positions", "budget", "against"),
)

LOSSLESS_BUDGETS = Table(
    "lossless_budgets",
    1,
    _columns(
        trace_id=STRING,
        problem_id=STRING,
        mode=STRING,
        policy=STRING,
        parameters=STRING,
        positions=STRING,
        n_budgets=INT,  # of the grid, with a verdict
        n_unknown=INT,  # of the grid, failed or without a verdict
        slots=INT,  # smallest budget at which, and at every larger one, the answer is kept
        budget=STRING,  # the same as asked
        any_slots=INT,  # smallest budget at which it is kept
        any_budget=STRING,
        monotone=BOOL,  # no budget that keeps the answer lies below one that loses it
        reason=STRING,  # why slots is null
    ),
    key=("trace_id", "mode", "policy", "parameters", "positions"),
)

OFFLINE_ONLINE = Table(
    "offline_online",
    1,
    _columns(
        measure=STRING,  # offline
        mode=STRING,
        positions=STRING,
        budget=STRING,
        policies=STRING,  # all, or without_excluded: no policies made from labels, no full cache
        statistic=STRING,  # spearman, kendall (tau-b)
        estimate=DOUBLE,  # over policies; positive = a larger measure goes with more accuracy
        low=DOUBLE,
        high=DOUBLE,
        level=DOUBLE,
        pvalue=DOUBLE,  # permutation, two-sided
        adjusted_pvalue=DOUBLE,  # Benjamini-Hochberg over measures and budgets; rest of the key equal
        n_policies=INT,
        note=STRING,
    ),
    key=("measure", "mode", "positions", "budget", "policies", "statistic"),
)

TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (
        TRACES,
        WINDOWS,
        EVICTION_KL,
        TOKEN_LABELS,
        SIGNALS,
        PROBED,
        HEAD_AGREEMENT,
        GATE_SIGNALS,
        CORRELATIONS,
        POLICY_VALIDITY,
        JUDGED,
        VALIDITY_SUMMARY,
        EVALUATIONS,
        KEEP_SETS,
        POLICY_ACCURACY,
        POLICY_COMPARISONS,
        LOSSLESS_BUDGETS,
        OFFLINE_ONLINE,
    )
}


def _without_pairs(content: pa.Table) -> pa.Table:
    return content.append_column("synergy", pa.nulls(len(content), FLOAT))


# (table, from version) -> function that lifts an Arrow table by one version.
MIGRATIONS: dict[tuple[str, int], Callable[[pa.Table], pa.Table]] = {
    ("eviction_kl", 1): _without_pairs,  # version 2 has pairs
}


def stamp(table: Table, fingerprint: str) -> dict[bytes, bytes]:
    """The footer metadata of a part."""
    return {SCHEMA_KEY: f"{table.name}/{table.version}".encode(), FINGERPRINT_KEY: fingerprint.encode()}


def check_version(table: Table, metadata: Mapping[bytes, bytes] | None, place: str) -> int:
    """The schema version in a footer; refuses a newer one, or a file that is not this table."""
    found = (metadata or {}).get(SCHEMA_KEY, b"").decode()
    name, _, version = found.partition("/")
    if name != table.name or not version.isdigit():
        raise CfkvError(
            f"{place} is not a part of the table {table.name!r} (its footer says {found or 'nothing'!r}); "
            "move it out of the run directory"
        )
    if int(version) > table.version:
        raise CfkvError(
            f"{place} has schema version {version} of {table.name!r}; this cfkv reads up to {table.version}: "
            "upgrade cfkv, or use another run directory"
        )
    return int(version)
