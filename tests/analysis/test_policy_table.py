"""The printed table: what is marked, what is said, and that it fits."""

import io

import numpy as np
import pytest
from rich.console import Console

from cfkv.analysis.compare import policy_accuracy, policy_comparisons
from cfkv.analysis.policy_table import accuracy_table, outcome, policies_in_order

from .evaluation_rows import arm, table

N = 40


def right(k):
    """k of N right, the same ones first."""
    return [1] * k + [0] * (N - k)


STUDY = [
    arm("full", "all", right(36)),
    *(arm("random", budget, right(k)) for budget, k in (("32", 2), ("128", 30))),
    *(arm("oracle", budget, right(k)) for budget, k in (("32", 35), ("128", 36))),
    *(arm("h2o", budget, right(k)) for budget, k in (("32", 18), ("128", 34))),
    *(arm("knorm", budget, right(k)) for budget, k in (("32", 3), ("128", 12))),
    arm("h2o", "32", right(1), parameters="recent_share=0.75;sinks=4"),
]


def printed(parts, width=100):
    evaluations = table(*parts)
    buffer = io.StringIO()
    made = accuracy_table(policy_accuracy(evaluations, draws=200), policy_comparisons(evaluations, draws=200))
    Console(file=buffer, width=width).print(made)
    return buffer.getvalue()


def test_marks_and_order():
    text = printed(STUDY)
    lines = text.splitlines()
    rows = {line.split()[0]: line for line in lines[3:7]}
    assert list(rows) == ["oracle", "h2o", "knorm", "random"]
    # 35 right against 2: better; against 36: one loss, not significant.
    assert ".88 +~" in rows["oracle"]
    assert ".07 ~<" in rows["knorm"]
    # Worse than random at 128: 12 against 30.
    assert ".30 -<" in rows["knorm"]
    # Random has no test against itself; at 128 it loses 6 of 36, 2 / 2^6 before and .125 after adjustment.
    assert ".05  <" in rows["random"]
    assert ".75  ~" in rows["random"]
    said = " ".join(text.split())
    assert "~ not significant (adjusted p from .05), blank: no test." in said
    assert "Full cache: .90 [.77, .96] of 40 rows." in said
    assert "Graded rows per arm: 40; failed: 0." in said
    assert "Adjusted (Holm) over the policies of a budget" in said
    # One setting has no arm at 128.
    assert lines[7].startswith("h2o recent_share=0.75;sinks=4")
    assert lines[7].split()[-1] == "-"


def test_it_fits_and_loses_nothing():
    budgets = [str(2**k) for k in range(4, 14)] + ["12.5%prompt", "50%prompt"]
    rng = np.random.default_rng(0)
    names = ["random", "avokv_e_no_redundancy", "a_policy_with_a_name_longer_than_any_column"]
    parts = [arm("full", "all", right(36))]
    parts += [arm(name, budget, rng.integers(0, 2, N)) for name in names for budget in budgets]
    text = printed(parts)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert all(budget in text for budget in budgets)
    assert text.count("policy  ") == 2
    assert text.count("First mark") == 1


def test_modes_have_tables_of_their_own():
    text = printed([*STUDY, arm("h2o", "32", right(9), mode="free")])
    assert "mode forced" in text
    assert "mode free" in text


def test_positions_are_named():
    text = printed([*STUDY, arm("h2o", "32", right(9), positions="compact")])
    assert any(line.startswith("h2o positions=compact") for line in text.splitlines())


def test_nothing_graded_is_a_dash():
    text = printed([arm("h2o", "32", [None, None]), arm("knorm", "32", [1, 0])])
    (line,) = [line for line in text.splitlines() if line.startswith("h2o")]
    assert line.split() == ["h2o", "-"]
    assert "Graded rows per arm: 0 to 2; failed: 0 to 2." in " ".join(text.split())


def test_table_of_nothing():
    assert printed([]).strip() == ""


def test_order_breaks_ties_at_the_next_budget():
    parts = [arm(name, "32", right(5)) for name in "abc"] + [
        arm(name, "64", right(k)) for name, k in (("a", 6), ("b", 9), ("c", 6))
    ]
    made = policy_accuracy(table(*parts), draws=50)
    assert [name for name, *_ in policies_in_order(made, "forced")] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("adjusted", "difference", "word"),
    [
        (0.049, 0.1, "better"),
        (0.049, -0.1, "worse"),
        (0.05, 0.9, "not significant"),
        (float("nan"), 0.9, "no test"),
        (None, 0.9, "no test"),
    ],
)
def test_outcomes_in_words(adjusted, difference, word):
    assert outcome({"adjusted_pvalue": adjusted, "difference": difference}) == word
    assert outcome(None) == "no test"
