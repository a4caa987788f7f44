import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from cfkv.analysis.smoothing import SMOOTHINGS, ema, rolling_mean, rolling_z, smooth
from cfkv.errors import CfkvError

NAN = np.nan


def naive(values, window, moment):
    """The definition, one position at a time."""
    out = []
    for t in range(len(values)):
        seen = values[max(0, t + 1 - window) : t + 1]
        seen = seen[~np.isnan(seen)]
        if np.isnan(values[t]):
            out.append(NAN)
        elif moment == "mean":
            out.append(seen.mean())
        else:
            out.append(0.0 if seen.size < 2 else (values[t] - seen.mean()) / (seen.std() + 1e-6))
    return np.array(out)


def test_ema_by_hand_in_both_directions():
    # 0.9 on the newest: 1; 0.9*2 + 0.1*1 = 1.9; 0.9*4 + 0.1*1.9 = 3.79
    np.testing.assert_allclose(ema([1, 2, 4], 0.9), [1, 1.9, 3.79])
    # 0.1 on the newest: 1; 0.1*2 + 0.9*1 = 1.1; 0.1*4 + 0.9*1.1 = 1.39
    np.testing.assert_allclose(ema([1, 2, 4], 0.1), [1, 1.1, 1.39])
    np.testing.assert_array_equal(ema([1, 2, 4], 1.0), [1, 2, 4])


def test_rolling_by_hand():
    # windows of 2: [1], [1,3], [3,8] -> means 1, 2, 5.5
    np.testing.assert_allclose(rolling_mean([1, 3, 8], 2), [1, 2, 5.5])
    # population std of [1,3] is 1, of [3,8] is 2.5: z = 1/(1+1e-6), 2.5/(2.5+1e-6); one sample gives 0
    np.testing.assert_allclose(rolling_z([1, 3, 8], 2), [0, 1 / 1.000001, 2.5 / 2.500001], rtol=1e-14)


def test_leading_missing_value_stays_missing_and_is_left_out():
    values = [NAN, 2.0, 4.0]
    np.testing.assert_array_equal(smooth(values, "raw"), values)
    np.testing.assert_allclose(ema(values, 0.5), [NAN, 2, 3])
    np.testing.assert_allclose(rolling_mean(values, 3), [NAN, 2, 3])
    np.testing.assert_allclose(rolling_z(values, 3), [NAN, 0, 1], atol=1e-5)
    # An infinite value counts as missing; the EMA carries over it.
    np.testing.assert_allclose(ema([2, np.inf, 4], 0.5), [2, NAN, 3])


@pytest.mark.parametrize("constant", [0.1, 1 / 3, 1e8 + 0.1, -7.3])
def test_a_constant_stays_constant_and_its_z_is_exactly_zero(constant):
    values = np.full(1000, constant)
    np.testing.assert_array_equal(rolling_z(values, 64), 0)
    np.testing.assert_array_equal(rolling_mean(values, 64), constant)
    np.testing.assert_array_equal(ema(values, 0.9), constant)


def test_a_constant_stretch_after_a_huge_value_has_z_zero():
    # Differences of cumulative sums fail here: 1e9 leaves noise in every later window.
    values = np.concatenate([[1e9], np.full(200, 0.1)])
    np.testing.assert_array_equal(rolling_z(values, 64)[64:], 0)


def test_a_linear_trend_moves_rolling_z_far_less_than_the_rolling_mean():
    rng = np.random.default_rng(0)
    noise, trend = rng.standard_normal(2000), 0.005 * np.arange(2000)
    moved_mean = np.std(rolling_mean(noise + trend, 64) - rolling_mean(noise, 64))
    moved_z = np.std(rolling_z(noise + trend, 64) - rolling_z(noise, 64))
    assert moved_mean > 2.5  # the trend itself: 10 / sqrt(12) = 2.9
    assert moved_z < 0.02 * moved_mean


def test_rolling_z_ignores_a_shift():
    values = np.random.default_rng(1).standard_normal(300)
    np.testing.assert_allclose(rolling_z(values + 5, 64), rolling_z(values, 64), atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, st.integers(1, 40), elements=st.sampled_from([NAN, -2.0, 0.0, 0.5, 1.0, 3.0])),
    st.integers(1, 45),
)
def test_rolling_matches_the_definition_for_any_window(values, window):
    np.testing.assert_allclose(rolling_mean(values, window), naive(values, window, "mean"), atol=1e-12)
    np.testing.assert_allclose(rolling_z(values, window), naive(values, window, "z"), atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.floats(-5, 5)),
    st.sampled_from(SMOOTHINGS),
    st.integers(1, 12),
)
def test_smoothing_is_causal_and_rows_do_not_mix(values, smoothing, cut):
    whole = smooth(values, smoothing, window=5)
    np.testing.assert_array_equal(smooth(values[:, :cut], smoothing, window=5), whole[:, :cut])
    np.testing.assert_array_equal(smooth(values[0], smoothing, window=5), whole[0])


def test_empty_and_wrong_input():
    for smoothing in SMOOTHINGS:
        assert smooth(np.zeros((3, 0)), smoothing).shape == (3, 0)
    with pytest.raises(CfkvError, match="did you mean 'ema'"):
        smooth([1.0], "emma")
    with pytest.raises(ValueError, match="weight of the newest"):
        ema([1.0], 0.0)
    with pytest.raises(ValueError, match="window = 0"):
        rolling_mean([1.0], 0)
