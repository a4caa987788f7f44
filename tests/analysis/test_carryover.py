"""Offline validity against online accuracy, over policies."""

import math

import numpy as np
import polars as pl
import pytest
from scipy.stats import kendalltau, rankdata, spearmanr

from cfkv.analysis.carryover import _Pairs, offline_online
from cfkv.errors import CfkvError
from cfkv.schemas import OFFLINE_ONLINE

DRAWS = 400


def accuracies(values, budget="64", mode="forced", parameters=""):
    """Rows of policy_accuracy with the columns that matter here."""
    return pl.DataFrame(
        [
            {
                "mode": mode,
                "policy": policy,
                "parameters": parameters,
                "positions": "absolute",
                "budget": budget,
                "accuracy": value,
            }
            for policy, value in values.items()
        ]
    )


def validity(values, measure="auroc"):
    return pl.DataFrame(
        [{"policy": name, "measure": measure, "value": value} for name, value in values.items()]
    )


OFFLINE = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4, "e": 0.5, "oracle": 1.0, "anti_oracle": 0.0}
ONLINE = {"a": 0.2, "b": 0.1, "c": 0.3, "d": 0.5, "e": 0.4, "oracle": 0.9, "anti_oracle": 0.0, "full": 1.0}


def test_by_hand():
    """Of a to e two neighbours are swapped twice: rho = 1 - 6 * 4 / (5 * 24) = .8, tau = (8 - 2) / 10 = .6."""
    frame = offline_online(validity(OFFLINE), accuracies(ONLINE), draws=DRAWS)
    assert frame.to_arrow().schema.names == OFFLINE_ONLINE.schema.names
    found = {(row["policies"], row["statistic"]): row for row in frame.to_dicts()}
    assert found["without_excluded", "spearman"]["estimate"] == pytest.approx(0.8)
    assert found["without_excluded", "kendall"]["estimate"] == pytest.approx(0.6)
    assert found["without_excluded", "spearman"]["n_policies"] == 5
    # With both oracles 7 policies: 1 - 6 * 4 / (7 * 48); (19 - 2) / 21. `full` has no offline value.
    assert found["all", "spearman"]["estimate"] == pytest.approx(1 - 24 / 336)
    assert found["all", "kendall"]["estimate"] == pytest.approx(17 / 21)
    assert found["all", "kendall"]["n_policies"] == 7
    # Exact p of rho = .8 at n = 5 is .133: not significant, and said so.
    row = found["without_excluded", "spearman"]
    assert row["pvalue"] == pytest.approx(0.133, abs=0.05)
    assert row["note"].startswith("not significant over 5 policies, adjusted p 0.1")
    assert found["all", "spearman"]["note"] is None
    assert -1 <= row["low"] <= row["estimate"] <= row["high"] <= 1


@pytest.mark.parametrize("statistic", ["spearman", "kendall"])
def test_resamples_and_permutations_are_those_of_scipy(statistic):
    """With ties on both sides: each resample and permutation is written out."""
    rng = np.random.default_rng(1)
    one, other = rng.integers(0, 4, 9).astype(float), rng.integers(0, 4, 9).astype(float)
    scipy = spearmanr if statistic == "spearman" else kendalltau
    counts = rng.multinomial(9, np.full(9, 1 / 9), size=60)
    found = _Pairs(one, other).resampled(counts.astype(float), statistic)
    expected = []
    for row in counts:
        index = np.repeat(np.arange(9), row)
        constant = np.ptp(one[index]) == 0 or np.ptp(other[index]) == 0
        expected.append(math.nan if constant else scipy(one[index], other[index]).statistic)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    orders = np.array([rng.permutation(9) for _ in range(40)])
    found = _Pairs(one, other).permuted(orders, statistic)
    np.testing.assert_allclose(found, [scipy(one, other[order]).statistic for order in orders], atol=1e-12)


def test_only_ranks_count():
    names = [f"p{index}" for index in range(9)]
    values = np.random.default_rng(2).standard_normal(9)
    online = np.random.default_rng(3).random(9)
    offline = dict(zip(names, values, strict=True))
    ranked = dict(zip(names, rankdata(values), strict=True))
    frames = [
        offline_online(validity(column), accuracies(dict(zip(names, online, strict=True))), draws=DRAWS)
        for column in (offline, ranked)
    ]
    assert frames[0].equals(frames[1])


@pytest.mark.parametrize(
    ("offline", "online", "note"),
    [
        (dict.fromkeys("abc", 0.1), dict.fromkeys("abc", 0.2), "no estimate: 3 policies, fewer than 4"),
        (
            dict.fromkeys("abcd", 0.1),
            dict(zip("abcd", (0.1, 0.2, 0.3, 0.4), strict=True)),
            "the same measure",
        ),
        (
            dict(zip("abcd", (0.1, 0.2, 0.3, 0.4), strict=True)),
            dict.fromkeys("abcd", 0.2),
            "the same accuracy",
        ),
    ],
)
def test_no_estimate_has_a_reason(offline, online, note):
    frame = offline_online(validity(offline), accuracies(online), draws=DRAWS)
    assert frame["estimate"].is_nan().all()
    assert all(note in text for text in frame["note"])


def test_missing_numbers_and_other_settings_are_left_out():
    online = pl.concat(
        [
            accuracies({**ONLINE, "a": math.nan}),
            accuracies({"b": 0.9}, parameters="recent_share=0.5"),
            accuracies(ONLINE, budget="128"),
        ]
    )
    frame = offline_online(validity({**OFFLINE, "c": None}), online, draws=DRAWS)
    kept = (
        frame.filter(statistic="kendall", policies="without_excluded").select("budget", "n_policies").rows()
    )
    assert kept == [("128", 4), ("64", 3)]


def test_two_values_of_a_policy_are_refused():
    twice = pl.concat([validity(OFFLINE), validity({"a": 0.3})])
    with pytest.raises(CfkvError, match="{'policy': 'a', 'measure': 'auroc'} has more than one value"):
        offline_online(twice, accuracies(ONLINE))


def test_adjusted_over_measures_and_budgets():
    """Two measures at two budgets: four tests per mode, statistic and set of policies."""
    names = [f"p{index}" for index in range(12)]
    rising = dict(zip(names, np.arange(12.0), strict=True))
    noise = dict(zip(names, np.random.default_rng(0).random(12), strict=True))
    measures = pl.concat([validity(rising), validity(noise, "recall")])
    online = pl.concat([accuracies(rising), accuracies(rising, budget="128")])
    frame = offline_online(measures, online, draws=DRAWS).filter(statistic="spearman", policies="all")
    by_measure = {row["measure"]: row for row in frame.to_dicts()}
    # The smallest p is 1/401, twice: times 4/2.
    assert by_measure["auroc"]["pvalue"] == pytest.approx(1 / 401)
    assert by_measure["auroc"]["adjusted_pvalue"] == pytest.approx(2 / 401)
    assert by_measure["recall"]["note"].startswith("not significant over 12 policies")
