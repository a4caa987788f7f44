"""The textbook score of every policy, by loops over float64 arrays; numbers are the papers', none is read from cfkv.

A formula returns [L, G, n], [L, 1, n] or [1, 1, n], n: what is left of each row, in the order of time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dense_cache import Array, Dense
from scipy.stats import rankdata
from world import DIM, HEADS, KV_HEADS, LAYERS

Formula = Callable[[Dense], Array]
PAIRS = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]


def each(compute: Callable[[int, int], Array]) -> Array:
    """[L, G, n] of a function of layer and KV head."""
    return np.array([[compute(layer, head) for head in range(KV_HEADS)] for layer in range(LAYERS)])


def softmax(values: Array) -> Array:
    weights = np.exp(values - values.max())
    found: Array = weights / weights.sum()
    return found


def norm(rows: Array) -> Array:
    found: Array = np.sqrt((rows**2).sum(axis=-1))
    return found


def minmax(values: Array) -> Array:
    found: Array = (values - values.min()) / (values.max() - values.min())
    return found


def rolling_mean(values: Array) -> Array:
    """Over 64 values, fewer at the start."""
    return np.array([values[max(t - 63, 0) : t + 1].mean() for t in range(len(values))])


def rolling_z(values: Array) -> Array:
    found = [0.0]
    for t in range(1, len(values)):
        window = values[max(t - 63, 0) : t + 1]
        found.append((values[t] - window.mean()) / (window.std() + 1e-6))
    return np.array(found)


# Attention of a window


def head_rows(cache: Dense, window: int, query_head: int, layer: int) -> Array:
    """[W, n]."""
    return np.array([cache.row(layer, query_head, query) for query in cache.newest(window)])


def window_mean(cache: Dense, window: int) -> Array:
    """Mean over the rows and over the query heads of a KV head, [L, G, n]."""
    return each(
        lambda layer, head: np.mean(
            [head_rows(cache, window, query_head, layer).mean(axis=0) for query_head in cache.group(head)],
            axis=0,
        )
    )


def pooled(values: Array, kernel: int, how: str) -> Array:
    """One position at a time; beyond the ends stand zeros for an average and nothing for a maximum."""
    half, found = kernel // 2, []
    for place in range(len(values)):
        near = values[max(place - half, 0) : place + half + 1]
        found.append(near.sum() / kernel if how == "average" else near.max())
    return np.array(found)


def snapkv(window: int, kernel: int, how: str) -> Formula:
    def formula(cache: Dense) -> Array:
        rows = window_mean(cache, window)

        def one(layer: int, head: int) -> Array:
            before = int((cache.kept[layer][head] < cache.step - window).sum())
            inside = rows[layer, head, before:]
            return np.concatenate([pooled(rows[layer, head, :before], kernel, how), inside])

        return each(one)

    return formula


def snapkv_page(scope: str) -> Formula:
    def formula(cache: Dense) -> Array:
        rows = window_mean(cache, 32)
        if scope == "kv_head":
            return rows
        return rows.mean(axis=1, keepdims=True) if scope == "layer" else rows.mean(axis=(0, 1), keepdims=True)

    return formula


def pyramidkv_page(cache: Dense) -> Array:
    """Three layers: 1.95, 1 and .05."""
    rows = window_mean(cache, 32).mean(axis=1)
    return ((1.95 * rows[0] + 1.0 * rows[1] + 0.05 * rows[2]) / 3)[None, None]


def tova(cache: Dense) -> Array:
    return np.array(
        [
            [np.mean([cache.row(layer, h, cache.step - 1) for h in range(HEADS)], axis=0)]
            for layer in range(LAYERS)
        ]
    )


def chunk_means(cache: Dense, chunk: int, window: int) -> list[tuple[float, list[int]]]:
    """Of layer 0: mean score and tokens of each chunk before the window."""
    rows = window_mean(cache, window)[0].mean(axis=0)
    tokens = [int(t) for t in cache.kept[0][0] if t < cache.step - window]
    parts = [range(start, min(start + chunk, len(tokens))) for start in range(0, len(tokens), chunk)]
    return [(float(np.mean(rows[list(part)])), [tokens[i] for i in part]) for part in parts]


def chunkkv(chunk: int, window: int) -> Formula:
    def formula(cache: Dense) -> Array:
        rows = window_mean(cache, window).mean(axis=1)
        found = rows.copy()
        for layer in range(LAYERS):
            before = int((cache.kept[layer][0] < cache.step - window).sum())
            for start in range(0, before, chunk):
                stop = min(start + chunk, before)
                found[layer, start:stop] = rows[layer, start:stop].mean()
        return found[:, None]

    return formula


def scissorhands(history: int) -> Formula:
    def formula(cache: Dense) -> Array:
        def one(layer: int, head: int) -> Array:
            held = cache.kept[layer][head]
            count = np.zeros(len(held))
            for query in cache.newest(history):
                row = np.mean([cache.row(layer, h, query) for h in cache.group(head)], axis=0)
                visible = held <= query
                count += visible & (row * visible.sum() < 1)
            return -count

        return each(one)

    return formula


# Keys and values


def keydiff(*, normalise: bool) -> Formula:
    def formula(cache: Dense) -> Array:
        def one(layer: int, head: int) -> Array:
            keys = cache.keys(layer, head)
            anchor = np.mean([key / norm(key) if normalise else key for key in keys], axis=0)
            return np.array([-(key @ anchor) / (norm(key) * norm(anchor)) for key in keys])

        return each(one)

    return formula


def knorm(cache: Dense) -> Array:
    return each(lambda layer, head: -norm(cache.keys(layer, head)))


def manifoldkv(length: int = 10**9, *, raw: bool = False) -> Formula:
    def formula(cache: Dense) -> Array:
        def one(layer: int, head: int) -> Array:
            held = cache.kept[layer][head]
            keys = (cache.all_raw_keys if raw else cache.all_keys)[layer, head, held]
            return np.array(
                [
                    norm(key - keys[held // length == t // length].mean(axis=0))
                    for t, key in zip(held, keys, strict=True)
                ]
            )

        return each(one)

    return formula


def manifoldkv_page(cache: Dense) -> Array:
    return manifoldkv()(cache).mean(axis=(0, 1), keepdims=True)


def capkv(cache: Dense) -> Array:
    """The inverse written out, one value at a time."""

    def one(layer: int, head: int) -> Array:
        keys, values = cache.keys(layer, head), cache.values(layer, head)
        query = np.mean(
            [cache.queries[layer, h, i] for h in cache.group(head) for i in cache.newest(32)], axis=0
        )
        weights = np.exp(np.minimum(5 * keys @ query / np.sqrt(DIM), 30))
        matrix = np.eye(DIM)
        for weight, value in zip(weights, values, strict=True):
            matrix += weight * np.outer(value, value)
        inverse = np.linalg.inv(matrix)
        return np.array([w * v @ inverse @ v for w, v in zip(weights, values, strict=True)])

    return each(one)


def caote(window: int) -> Formula:
    """The output with the token less the output without it, whose weights are renormalised."""

    def formula(cache: Dense) -> Array:
        def one(layer: int, head: int) -> Array:
            values, found = cache.values(layer, head), []
            for h in cache.group(head):
                row = head_rows(cache, window, h, layer).mean(axis=0)
                row /= row.sum()
                moved = []
                for j in range(len(row)):
                    others = np.delete(row, j)
                    without = others / others.sum() @ np.delete(values, j, axis=0)
                    moved.append(norm(row @ values - without))
                found.append(moved)
            return np.mean(found, axis=0)

        return each(one)

    return formula


def fast_caote(cache: Dense) -> Array:
    def one(layer: int, head: int) -> Array:
        values = cache.values(layer, head)
        distance = norm(values.mean(axis=0) - values)
        rows = [cache.row(layer, h, cache.step - 1) for h in cache.group(head)]
        return np.mean([row / (1 - row) * distance for row in rows], axis=0)

    return each(one)


def longflow(cache: Dense) -> Array:
    """Mean over query heads of the L1 norm of the weighted value, per channel."""
    found = np.zeros((LAYERS, 1, len(cache.kept[0][0])))
    for layer in range(LAYERS):
        for h in range(HEADS):
            row, values = cache.row(layer, h, cache.step - 1), cache.values(layer, h // (HEADS // KV_HEADS))
            for j in range(len(row)):
                found[layer, 0, j] += np.abs(row[j] * values[j]).sum() / (HEADS * DIM)
    return found


def ahakv(budget: int, recent: int, kernel: int) -> Formula:
    def formula(cache: Dense) -> Array:
        def one(layer: int, head: int) -> Array:
            held, mass = cache.kept[layer][head], 0.0
            for query in cache.newest(recent):
                visible = held <= query
                growth = np.log(visible.sum() / budget)
                gain = max(1 / np.sqrt(DIM), np.sqrt(2 * growth / DIM) if growth > 0 else 0.0)
                for h in cache.group(head):
                    weights = np.exp(cache.logits(layer, h, query) / cache.scaling * gain) * visible
                    mass = mass + weights / weights.sum() / len(cache.group(head))
            prior = pooled((cache.values(layer, head) ** 2).sum(axis=-1), kernel, "average")
            return mass * prior / prior.max()

        return each(one)

    return formula


# LagKV


def lag_shares(cache: Dense, rows: Array, held: Any, sinks: int, lag: int) -> list[tuple[list[int], Array]]:
    """Places and softmax of each partition with a full partition after its own; references are what is left of it."""
    partition = (held - sinks) // lag
    full, found = (cache.step - sinks) // lag, []
    for index in range(full - 1):
        places = np.flatnonzero((held >= sinks) & (partition == index))
        if len(places):
            after = min(int(p) for p in partition if p > index)
            reference = rows[(held >= sinks) & (partition == after)]
            low, high = reference.min(axis=0), reference.max(axis=0)
            spread = [((rows[j] - low) / (high - low + 1e-9)).std(ddof=1) for j in places]
            found.append((places.tolist(), softmax(np.array(spread))))
    return found


def lagkv(sinks: int, lag: int, *, ranks: bool) -> Formula:
    def formula(cache: Dense) -> Array:
        def one(layer: int, head: int) -> Array:
            held = cache.kept[layer][head]
            keys = lag_shares(cache, cache.keys(layer, head), held, sinks, lag)
            values = lag_shares(cache, cache.values(layer, head), held, sinks, lag)
            found = np.full(len(held), 1.0)
            for (places, first), (_, second) in zip(keys, values, strict=True):
                total = first + second
                found[places] = (rankdata(total) - 1) / lag if ranks else total
            return found

        return each(one)

    return formula


def lag_spread(cached: Array, chunk: int) -> Array:
    """[G, n, D]: each chunk on the range of the one before; the first one raw; mean over KV heads."""
    found = np.zeros(cached.shape[:2])
    for head, rows in enumerate(cached):
        for j, row in enumerate(rows):
            start = j // chunk * chunk
            if start == 0:
                found[head, j] = row.std(ddof=1)
            else:
                low, high = rows[start - chunk : start].min(axis=0), rows[start - chunk : start].max(axis=0)
                found[head, j] = ((row - low) / (high - low + 1e-9)).std(ddof=1)
    mean: Array = found.mean(axis=0)
    return mean


def epikv_lag(chunk: int, *, values: bool) -> Formula:
    """Chunks of what is left."""

    def formula(cache: Dense) -> Array:
        held = cache.kept[0][0]
        total = lag_spread(cache.all_keys[:, :, held].mean(axis=0), chunk)
        if values:
            total = total + lag_spread(cache.all_values[:, :, held].mean(axis=0), chunk)
        return total[None, None]

    return formula


def epikv_lag_frozen(chunk: int, *, values: bool) -> Formula:
    """Chunks of all that was ever there."""

    def formula(cache: Dense) -> Array:
        total = lag_spread(cache.all_keys[:, :, : cache.step].mean(axis=0), chunk)
        if values:
            total = total + lag_spread(cache.all_values[:, :, : cache.step].mean(axis=0), chunk)
        return total[cache.kept[0][0]][None, None]

    return formula


# R-KV and AvoKV-E


def importance(cache: Dense, window: int, kernel: int) -> Array:
    def one(layer: int, head: int) -> Array:
        before = cache.kept[layer][head] < cache.step - window
        rows = []
        for query in cache.newest(window):
            largest = np.max([cache.logits(layer, h, query) for h in cache.group(head)], axis=0)
            rows.append(softmax(largest[before]))
        found = np.zeros(len(before))
        found[before] = pooled(np.mean(rows, axis=0), kernel, "max")
        return found

    return each(one)


def redundancy(cache: Dense) -> Array:
    """Row by row, the newest key whose cosine is above .5 is exempt."""

    def one(layer: int, head: int) -> Array:
        keys = cache.keys(layer, head)
        units = keys / norm(keys)[:, None]
        cosines = units @ units.T
        for i in range(len(units)):
            cosines[i, i] = 0
            above = [j for j in range(len(units)) if cosines[i, j] > 0.5]
            if above:
                cosines[i, above[-1]] = 0
        return cosines.mean(axis=0)

    return each(one)


def r_kv(cache: Dense) -> Array:
    repeated = redundancy(cache)
    return 0.1 * importance(cache, 8, 7) - 0.9 * each(lambda layer, head: softmax(repeated[layer, head]))


def candidates(cache: Dense, layer: int, head: int, sinks: int, delay: int) -> Any:
    held = cache.kept[layer][head]
    return np.flatnonzero((held >= sinks) & (held < cache.step - delay))


def on_scale(values: Array, how: str, buckets: int) -> Array:
    """`values` of the candidates, in the order of time."""
    count = len(values)
    if how == "percentile":
        found: Array = (rankdata(values) - 1) / (count - 1)
    elif how == "age_bucket":
        bucket = np.array([j * buckets // count for j in range(count)])
        found = np.zeros(count)
        for index in range(buckets):
            inside = np.flatnonzero(bucket == index)
            found[inside] = (rankdata(values[inside]) - 1) / (len(inside) - 1)
    elif how == "minmax":
        found = (values - values.min()) / (values.max() - values.min())
    elif how == "z":
        found = (values - values.mean()) / values.std()
    else:
        found = values
    return found


def recent_rows(cache: Dense) -> Array:
    """The newest of 8 rows counts 8 times the oldest: 1 + 2 + ... + 8 = 36."""
    return each(
        lambda layer, head: sum(
            (place + 1) / 36 * np.mean([cache.row(layer, h, query) for h in cache.group(head)], axis=0)
            for place, query in enumerate(cache.newest(8))
        )
    )


def value_norm(cache: Dense) -> Array:
    return each(lambda layer, head: norm(cache.values(layer, head)))


def avokv(
    *,
    read: Formula = lambda cache: window_mean(cache, 8),
    weights: tuple[float, float, float] = (0.1, -0.9, 0.05),
    how: str = "percentile",
    delay: int = 32,
    buckets: int = 8,
) -> Formula:
    def formula(cache: Dense) -> Array:
        terms = (read(cache), redundancy(cache), value_norm(cache))

        def one(layer: int, head: int) -> Array:
            free = candidates(cache, layer, head, 4, delay)
            found = np.zeros(len(cache.kept[layer][head]))
            for weight, term in zip(weights, terms, strict=True):
                found[free] += weight * on_scale(term[layer, head, free], how, buckets)
            return found

        return each(one)

    return formula


def rkv_payload(cache: Dense) -> Array:
    base = r_kv(cache)

    def one(layer: int, head: int) -> Array:
        free = candidates(cache, layer, head, 4, 32)
        found: Array = base[layer, head].copy()
        found[free] += 0.05 * on_scale(norm(cache.values(layer, head))[free], "percentile", 0)
        return found

    return each(one)


# What is folded token by token


def h2o(cache: Dense) -> Array:
    """All rows, those of the prompt included; sum over the group."""
    mass = np.zeros((LAYERS, KV_HEADS, cache.step))
    for layer, head in PAIRS:
        for h in cache.group(head):
            for query in range(cache.step):
                mass[layer, head] += cache.history(layer, h, query)
    return cache.per_head(mass)


def mean_rows(cache: Dense) -> Array:
    """Attention of each query, mean over layers and heads, [N, N]."""
    return np.array(
        [
            np.mean([cache.history(layer, h, query) for layer in range(LAYERS) for h in range(HEADS)], axis=0)
            for query in range(cache.step)
        ]
    )


def h2o_global(cache: Dense) -> Array:
    """The prompt's rows contribute their mean, each later row itself."""
    rows = mean_rows(cache)
    mass = rows[: cache.prompt].mean(axis=0) + rows[cache.prompt :].sum(axis=0)
    return mass[cache.kept[0][0]][None, None]


def h2o_page(cache: Dense) -> Array:
    """The prompt's rows alone."""
    return mean_rows(cache)[: cache.prompt].sum(axis=0)[cache.kept[0][0]][None, None]


def raas(alpha: float) -> Formula:
    def formula(cache: Dense) -> Array:
        found = []
        for layer in range(LAYERS):
            stamps = np.arange(cache.step, dtype=float)
            for query in range(cache.prompt, cache.step):
                row = np.mean([cache.history(layer, h, query) for h in range(HEADS)], axis=0)
                stamps[row > alpha] = query
            found.append([stamps[cache.kept[layer][0]]])
        return np.array(found)

    return formula


def raas_epikv(cache: Dense) -> Array:
    rows, stamps = mean_rows(cache), np.arange(cache.step, dtype=float)
    for query in range(cache.prompt, cache.step):
        generated = range(cache.prompt, query + 1)
        median = np.median(rows[query, list(generated)])
        for j in generated:
            if rows[query, j] >= median:
                stamps[j] = query
    return stamps[cache.kept[0][0]][None, None]


def lazy_eviction(cache: Dense) -> Array:
    """TS and MRI by the rule, one query at a time."""
    found = np.zeros((LAYERS, KV_HEADS, cache.step))
    for layer, head in PAIRS:
        stamp: dict[int, int] = {}
        gap: dict[int, int] = {}
        for t in range(cache.step):
            stamp[t], gap[t] = t, 0
            row = np.max([cache.history(layer, h, t) for h in cache.group(head)], axis=0)
            for j in range(t + 1):
                if row[j] >= 1 / (t + 1):
                    gap[j] = max(gap[j], t - stamp[j])
                    stamp[j] = t
        now = cache.step - 1
        for j in range(cache.step):
            if gap[j] == 0:
                found[layer, head, j] = 1.0 if stamp[j] == now else 0.0
            else:
                due, seldom = np.exp((now - stamp[j]) / gap[j]), np.exp(1 / gap[j])
                found[layer, head, j] = 2 / (1 + due) + 2 / (1 + seldom)
    return cache.per_head(found)


@dataclass(frozen=True)
class Case:
    """A policy with its options and its formula."""

    name: str
    formula: Formula
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


CASES = [
    Case("snapkv", snapkv(32, 5, "average")),
    Case("snapkv", snapkv(8, 3, "max"), {"observation": 8, "kernel": 3, "pooling": "max"}),
    Case("snapkv_decode", snapkv(8, 7, "max")),
    Case("snapkv_page", snapkv_page("global")),
    Case("snapkv_layer", snapkv_page("layer")),
    Case("snapkv_head", snapkv_page("kv_head")),
    Case("pyramidkv", snapkv(32, 5, "average")),
    Case("pyramidkv_page", pyramidkv_page),
    Case("ada_kv", snapkv(32, 7, "max")),
    Case("ada_kv_fill", snapkv(32, 7, "max")),
    Case("ada_kv_fill", manifoldkv(), {"base": "manifoldkv", "alpha": 0.5}),
    Case("tova", tova),
    Case("chunkkv", chunkkv(10, 32)),
    Case("chunkkv", chunkkv(20, 16), {"chunk": 20, "observation": 16}),
    Case("scissorhands", scissorhands(400)),
    Case("scissorhands", scissorhands(50), {"history": 50}),
    Case("keydiff", keydiff(normalise=True)),
    Case("keydiff_raw", keydiff(normalise=False)),
    Case("knorm", knorm),
    Case("manifoldkv", manifoldkv()),
    Case("manifoldkv_prerotary", manifoldkv(raw=True)),
    Case("manifoldkv_windowed", manifoldkv(length=32), {"length": 32}),
    Case("manifoldkv_page", manifoldkv_page),
    Case("capkv", capkv),
    Case("caote", caote(1)),
    Case("caote", caote(32), {"observation": 32}),
    Case("fast_caote", fast_caote),
    Case("longflow", longflow),
    Case("ahakv", ahakv(1024, 32, 5)),
    Case("ahakv", ahakv(20, 8, 3), {"cache": 20, "observation": 8, "kernel": 3}),
    Case("lagkv", lagkv(16, 20, ranks=False), {"lag": 20}),
    Case("lagkv_rank", lagkv(4, 20, ranks=True), {"lag": 20}),
    Case("epikv_lag_key", epikv_lag(128, values=False)),
    Case("epikv_lag_key", epikv_lag(32, values=False), {"chunk": 32}),
    Case("epikv_lag_kv", epikv_lag(32, values=True), {"chunk": 32}),
    Case("epikv_lag_key", epikv_lag_frozen(32, values=False), {"chunk": 32, "frozen": True}),
    Case("epikv_lag_kv", epikv_lag_frozen(20, values=True), {"chunk": 20, "frozen": True}),
    Case("r_kv", r_kv),
    Case("avokv_e", avokv()),
    Case("avokv_e", avokv(delay=8), {"delay": 8}),
    Case("avokv_e", avokv(weights=(0.1, -0.9, 0.2)), {"payload_weight": 0.2}),
    Case("avokv_e", avokv(how="age_bucket"), {"normaliser": "age_bucket"}),
    Case("avokv_e", avokv(how="age_bucket", buckets=3), {"normaliser": "age_bucket", "buckets": 3}),
    Case("avokv_e", avokv(how="minmax"), {"normaliser": "minmax"}),
    Case("avokv_e", avokv(how="z"), {"normaliser": "z"}),
    Case("avokv_e_raw", avokv(how="raw")),
    Case("avokv_e_no_payload", avokv(weights=(0.1, -0.9, 0))),
    Case("avokv_e_no_redundancy", avokv(weights=(0.1, 0, 0.05))),
    Case("avokv_e_no_delay", avokv(delay=0)),
    Case("avokv_e_recency", avokv(read=recent_rows)),
    Case("avokv_e_rkv_anchor", avokv(read=lambda cache: importance(cache, 8, 7))),
    Case("avokv_e_rkv_payload", rkv_payload),
    Case("h2o", h2o),
    Case("h2o_global", h2o_global),
    Case("h2o_page", h2o_page),
    Case("raas", raas(1e-4)),
    Case("raas", raas(0.01), {"alpha": 0.01}),
    Case("raas_epikv", raas_epikv),
    Case("lazy_eviction", lazy_eviction),
]
