"""The textbook formula of every signal, on dense float64 arrays: loops where the definition has them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from dense import Array, Dense, Layer

from cfkv.signals.lag_key import LagKey
from cfkv.signals.lagkv import Lagkv

NAN = np.nan


def norm(rows: Array) -> Array:
    return np.sqrt((rows**2).sum(axis=-1))


def unit(rows: Array) -> Array:
    return rows / norm(rows)[..., None]


def change(rows: Array) -> Array:
    return np.array([[NAN, *(norm(rows[t] - rows[t - 1]) for t in range(1, len(rows)))]])


def turn(rows: Array) -> Array:
    units = unit(rows)
    return np.array([[NAN, *(1 - units[t] @ units[t - 1] for t in range(1, len(rows)))]])


def variance(rows: Array) -> Array:
    return rows.var(axis=-1, ddof=1)


def cross_head(keys: Array) -> Array:
    return keys.var(axis=0).mean(axis=-1)[None]


def centroid(keys: Array) -> Array:
    return np.stack([norm(keys[:, t] - keys[:, : t + 1].mean(axis=1)) for t in range(keys.shape[1])], axis=-1)


def keydiff(keys: Array) -> Array:
    anchor = unit(unit(keys).mean(axis=1))
    return np.einsum("gnd,gd->gn", unit(keys), anchor)


def keydiff_running(keys: Array) -> Array:
    return np.stack([keydiff(keys[:, : t + 1])[:, t] for t in range(keys.shape[1])], axis=-1)


def lag(rows: Array) -> Array:
    """Chunk by chunk, against the range of the chunk before."""
    size, result = LagKey.chunk, rows.std(axis=-1, ddof=1)
    for start in range(size, rows.shape[1], size):
        before = rows[:, start - size : start]
        low, high = before.min(axis=1, keepdims=True), before.max(axis=1, keepdims=True)
        scaled = (rows[:, start : start + size] - low) / (high - low)
        result[:, start : start + size] = scaled.std(axis=-1, ddof=1)
    return result


def softmax(rows: Array) -> Array:
    weights = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def lagkv(keys: Array, values: Array) -> Array:
    """Partition by partition, against the range of the one after."""
    size, result = Lagkv.partition, np.full(keys.shape[:2], NAN)
    for start in range(Lagkv.sinks, keys.shape[1] - 2 * size + 1, size):
        total = 0.0
        for rows in (keys, values):
            after = rows[:, start + size : start + 2 * size]
            low, high = after.min(axis=1, keepdims=True), after.max(axis=1, keepdims=True)
            total = total + softmax(
                ((rows[:, start : start + size] - low) / (high - low)).std(axis=-1, ddof=1)
            )
        result[:, start : start + size] = total
    return result


def redundancy(keys: Array) -> Array:
    """R-KV's, row by row: the newest key above 0.5 is exempt from a row."""
    result = []
    for head in unit(keys):
        cosines = head @ head.T
        np.fill_diagonal(cosines, 0)
        for row in cosines:
            above = np.flatnonzero(row > 0.5)
            if len(above):
                row[above[-1]] = 0
        result.append(cosines.mean(axis=0))
    return np.array(result)


def max_cosine(keys: Array) -> Array:
    return np.array(
        [[NAN, *((head[:t] @ head[t]).max() for t in range(1, len(head)))] for head in unit(keys)]
    )


def leverage(layer: Layer) -> Array:
    """One key at a time, with the inverse written out."""
    anchors = layer.by_kv_head(layer.queries[:, -32:].mean(axis=1))
    result = []
    for keys, values, anchor in zip(layer.keys, layer.values, anchors, strict=True):
        weights = np.exp(np.minimum(5 * keys @ anchor / np.sqrt(keys.shape[-1]), 30))
        inverse = np.linalg.inv(np.eye(keys.shape[-1]) + (values.T * weights) @ values)
        result.append([w * v @ inverse @ v for w, v in zip(weights, values, strict=True)])
    return np.array(result)


HIDDEN: dict[str, Callable[[Array], Array]] = {
    "hidden_diff": change,
    "hidden_norm": lambda rows: norm(rows)[None],
    "hidden_cosine_diff": turn,
}
LAYER: dict[str, Callable[[Layer], Array]] = {
    "attention_output_diff": lambda layer: change(layer.attention_output),
    "mlp_output_diff": lambda layer: change(layer.mlp_output),
    "key_norm": lambda layer: norm(layer.keys),
    "key_variance": lambda layer: variance(layer.keys),
    "value_norm": lambda layer: norm(layer.values),
    "value_variance": lambda layer: variance(layer.values),
    "cross_head_key_variance": lambda layer: cross_head(layer.keys),
    "key_centroid_distance": lambda layer: centroid(layer.keys),
    "keydiff_cosine": lambda layer: keydiff(layer.keys),
    "keydiff_running": lambda layer: keydiff_running(layer.keys),
    "lag_key": lambda layer: lag(layer.keys),
    "lag_value": lambda layer: lag(layer.values),
    "lagkv": lambda layer: lagkv(layer.keys, layer.values),
    "key_redundancy": lambda layer: redundancy(layer.keys),
    "key_max_cosine": lambda layer: max_cosine(layer.keys),
    "capkv_leverage": leverage,
    "key_variance_prerotary": lambda layer: variance(layer.raw_keys),
    "cross_head_key_variance_prerotary": lambda layer: cross_head(layer.raw_keys),
    "key_centroid_distance_prerotary": lambda layer: centroid(layer.raw_keys),
    "keydiff_running_prerotary": lambda layer: keydiff_running(layer.raw_keys),
    "lag_key_prerotary": lambda layer: lag(layer.raw_keys),
}


def visible(layer: Layer) -> Array:
    """Keys that each query sees."""
    return (layer.attention[0] > 0).sum(axis=-1)


def window(attention: Array, queries: int) -> Array:
    return attention[:, -queries:].mean(axis=1)


def pressure(attention: Array, horizon: int) -> Array:
    heads, count = attention.shape[:2]
    result = np.full((heads, count), NAN)
    for key in range(count - horizon):
        result[:, key] = attention[:, key + 1 : key + 1 + horizon, key].mean(axis=1)
    return result


def row_entropy(attention: Array) -> Array:
    logs = np.log(attention, where=attention > 0, out=np.zeros_like(attention))
    return -(attention * logs).sum(axis=-1)


def sparsity(layer: Layer) -> Array:
    below = layer.attention < 0.01 * layer.attention.max(axis=-1, keepdims=True)
    return (below & (layer.attention > 0)).sum(axis=-1) / visible(layer)


def first_strong_read(layer: Layer) -> Array:
    attention, share = layer.attention.mean(axis=0), 5 / visible(layer)
    count = len(attention)
    result = np.full((1, count), NAN)
    for key in range(count):
        lags = [
            lag for lag in range(1, 33) if key + lag < count and attention[key + lag, key] > share[key + lag]
        ]
        if lags or key + 32 < count:
            result[0, key] = lags[0] if lags else 33
    return result


def readings(attention: Array, layer: Layer, key: int) -> list[int]:
    """Queries that give the key its uniform share; it counts as read when it is written."""
    later = [t for t in range(key, len(attention)) if attention[t, key] >= 1 / visible(layer)[t]]
    return sorted({key, *later})


def refresh_age(layer: Layer) -> Array:
    attention = layer.attention.mean(axis=0)
    count = len(attention)
    return np.array([[count - 1.0 - readings(attention, layer, key)[-1] for key in range(count)]])


def recurrence(layer: Layer) -> Array:
    attention = layer.attention.max(axis=0)
    gaps = [np.diff(readings(attention, layer, key)) for key in range(len(attention))]
    return np.array([[float(max(found, default=0)) for found in gaps]])


def caote(layer: Layer) -> Array:
    """Evict each key in turn and compute the output again."""
    result = []
    for head, weights in enumerate(window(layer.attention, 32)):
        values = layer.values[head // layer.group]
        errors = []
        for key in range(len(values)):
            kept = np.delete(np.arange(len(values)), key)
            rest = weights[kept].sum()
            if rest < 1e-6:  # nothing else is attended to
                errors.append((1 - 1e-6) / 1e-6 * norm(weights @ values - values[key]))
                continue
            errors.append(norm(weights @ values - weights[kept] @ values[kept] / rest))
        result.append(errors)
    return layer.by_kv_head(np.array(result))


def longflow(layer: Layer) -> Array:
    values = np.repeat(layer.values, layer.group, axis=0)
    return layer.by_kv_head(np.abs(layer.attention[:, -1, :, None] * values).sum(axis=-1) / values.shape[-1])


ATTENTION: dict[str, Callable[[Layer], Array]] = {
    "attention_received": lambda layer: layer.by_kv_head(layer.attention.sum(axis=1)),
    "attention_received_mean": lambda layer: layer.by_kv_head(
        layer.attention.sum(axis=1) / np.arange(layer.attention.shape[1], 0, -1)
    ),
    "attention_window": lambda layer: layer.by_kv_head(window(layer.attention, 32)),
    "attention_last": lambda layer: layer.by_kv_head(layer.attention[:, -1]),
    "read_pressure_8": lambda layer: pressure(layer.by_kv_head(layer.attention), 8),
    "read_pressure_32": lambda layer: pressure(layer.by_kv_head(layer.attention), 32),
    "attention_entropy": lambda layer: layer.by_kv_head(row_entropy(layer.attention)),
    "attention_max": lambda layer: layer.by_kv_head(layer.attention.max(axis=-1)),
    "sink_mass": lambda layer: layer.by_kv_head(layer.attention[..., :4].sum(axis=-1)),
    "thinkv_sparsity": lambda layer: layer.by_kv_head(sparsity(layer)),
    "strong_read_lag": first_strong_read,
    "last_refresh_age": refresh_age,
    "recurrence_interval": recurrence,
    "caote_error": caote,
    "longflow_score": longflow,
}


def predictions(trace: Dense, read: Callable[[Array, int], float]) -> Array:
    """`read` of the distribution that predicted each token but the first."""
    return np.array([[NAN, *(read(trace.logits[t - 1], trace.ids[t]) for t in range(1, len(trace.ids)))]])


def surprisal(logits: Array, token: int) -> float:
    return float(-np.log(softmax(logits)[token]))


def entropy(logits: Array, token: int) -> float:
    p = softmax(logits)
    return float(-(p * np.log(p)).sum())


def margin(logits: Array, token: int) -> float:
    second, first = np.sort(logits)[-2:]
    return float(first - second)


def indicator(test: Callable[[str], bool]) -> Callable[[Dense], Array]:
    return lambda trace: np.array([[float(test(text)) for text in trace.texts]])


# The tiny models' words: digits, markers, `\boxed{` and `}`, and words of letters and digits.
WHOLE: dict[str, Callable[[Dense], Array]] = {
    "surprisal": lambda trace: predictions(trace, surprisal),
    "predictive_entropy": lambda trace: predictions(trace, entropy),
    "top1_margin": lambda trace: predictions(trace, margin),
    "token_position": lambda trace: np.arange(len(trace.ids), dtype=float)[None],
    "reasoning_position": lambda trace: np.arange(len(trace.ids))[None] / len(trace.ids),
    "token_digit": indicator(str.isdigit),
    "token_word": indicator(lambda text: text[0].isalpha()),
    "token_delimiter": indicator(lambda text: text[0] in "<\\}"),
    "token_operator": indicator(lambda text: False),
    "token_whitespace": indicator(lambda text: False),
}


def reference(trace: Dense) -> dict[tuple[str, int | None], Array]:
    """All signals of a trace."""
    found: dict[tuple[str, int | None], Array] = {}
    for index, stream in enumerate([trace.embedding, *(layer.hidden for layer in trace.layers)]):
        found |= {(name, index - 1): formula(stream) for name, formula in HIDDEN.items()}
    for index, layer in enumerate(trace.layers):
        found |= {(name, index): formula(layer) for name, formula in {**LAYER, **ATTENTION}.items()}
    return found | {(name, None): formula(trace) for name, formula in WHOLE.items()}
