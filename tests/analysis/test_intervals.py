import math

import numpy as np
import pytest
from scipy.stats import norm, ttest_1samp

from cfkv.analysis.intervals import fisher_z_interval, wilson_interval, within_interval


@pytest.mark.parametrize(
    ("n_eff", "half_width"),
    [(352, 0.104), (78, 0.222), (72, 0.231), (11, 0.591), (8, 0.693)],  # closed_forms.md E11
)
@pytest.mark.parametrize("rho", [0.0, 0.38, -0.254])
def test_fisher_z_half_widths_of_epikv(n_eff, half_width, rho):
    result = fisher_z_interval(rho, n_eff + 3)  # E10: 355 traces have n_eff 352
    assert math.atanh(result.high) - math.atanh(rho) == pytest.approx(half_width, abs=5e-4)
    assert math.atanh(rho) - math.atanh(result.low) == pytest.approx(half_width, abs=5e-4)


def test_fisher_z_p_value_and_its_duality_with_the_interval():
    # atanh(.2) = .202733; * sqrt(72) = 1.72024; two-sided p = .0854
    assert fisher_z_interval(0.2, 75).pvalue == pytest.approx(2 * norm.sf(1.72024), rel=1e-4)
    assert fisher_z_interval(-0.2, 75).pvalue == fisher_z_interval(0.2, 75).pvalue
    # methods.md 12: below about .23 no rho of 75 traces excludes zero
    below, above = fisher_z_interval(0.226, 75), fisher_z_interval(0.230, 75)
    assert below.low < 0 < above.low
    assert above.pvalue < 0.05 < below.pvalue


def test_fisher_z_degenerate():
    few = fisher_z_interval(0.5, 3)
    assert (few.reason, math.isnan(few.low), math.isnan(few.estimate)) == ("n_traces < 4", True, True)
    assert fisher_z_interval(math.nan, 50).reason == "no correlation"
    perfect = fisher_z_interval(1.0, 50)
    assert perfect.low < perfect.high == perfect.estimate == 1.0
    assert perfect.low > 0.99


def test_within_interval_is_a_t_interval_of_fisher_z():
    rhos = np.array([0.1, 0.3, np.nan, -0.05, 0.4])
    z = np.arctanh(rhos[[0, 1, 3, 4]])
    expected = ttest_1samp(z, 0)
    low, high = np.tanh(expected.confidence_interval(0.95))
    result = within_interval(rhos)
    assert (result.n_traces, result.n_dropped, result.reason) == (4, 1, None)
    assert result.estimate == pytest.approx(math.tanh(z.mean()))
    assert (result.low, result.high) == pytest.approx((low, high))
    assert result.pvalue == pytest.approx(expected.pvalue)


def test_within_interval_with_several_traces_of_a_problem():
    # Every trace twice adds no information: the same interval as once, if the problem is the unit.
    rhos = np.array([0.1, 0.3, -0.05, 0.4])
    once, twice = within_interval(rhos), within_interval(np.repeat(rhos, 2), np.repeat(np.arange(4), 2))
    assert (twice.low, twice.high, twice.pvalue) == pytest.approx((once.low, once.high, once.pvalue))
    assert twice.n_traces == 8
    assert within_interval(np.repeat(rhos, 2)).pvalue < once.pvalue


def test_within_interval_degenerate():
    assert within_interval(np.array([0.3, np.nan])).reason == "fewer than 2 usable traces"
    assert within_interval(np.zeros(0)).reason == "fewer than 2 usable traces"
    same_problem = within_interval(np.array([0.3, 0.4]), np.array([7, 7]))
    assert same_problem.reason == "fewer than 2 usable problems"
    assert math.isnan(same_problem.estimate)
    # All traces agree to the last bit: a t-test would say p = 0; the sign test of 5 traces says 2/32.
    perfect = within_interval(np.ones(5))
    assert (perfect.estimate, perfect.pvalue) == (pytest.approx(0.999), 2 / 32)
    assert within_interval(np.zeros(5)).pvalue == 1.0


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [  # closed_forms.md A3-A7, the computed column
        (2, 526, 0.0010, 0.0138),
        (89, 100, 0.8137, 0.9375),
        (0, 100, 0.0, 0.0370),
        (1, 100, 0.0018, 0.0545),
        (14, 100, 0.0853, 0.2214),
        (5, 100, 0.0215, 0.1118),
        (4, 100, 0.0157, 0.0984),
    ],
)
def test_wilson_reproduces_page(successes, total, low, high):
    result = wilson_interval(successes, total)
    assert (result.low, result.high) == pytest.approx((low, high), abs=5.1e-5)
    mirrored = wilson_interval(total - successes, total)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((result.low, result.high))


def test_wilson_degenerate():
    assert wilson_interval(0, 0).reason == "no trials"
    assert wilson_interval(0, 5).low == 0.0
    assert wilson_interval(5, 5).high == 1.0
    with pytest.raises(ValueError, match="pass counts"):
        wilson_interval(6, 5)
