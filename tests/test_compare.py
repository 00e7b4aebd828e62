"""The comparison itself: what it must catch, and that it cannot be fooled by NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kda_lab.compare import assert_close, compare, output_tolerance, relative_rms, state_tolerance

TRUTH = np.array([[3.0, 0.0], [0.0, 4.0]])


def test_relative_rms_is_the_ratio_of_norms() -> None:
    assert relative_rms(TRUTH + np.array([[0.0, 0.3], [0.4, 0.0]]), TRUTH) == pytest.approx(0.5 / 5)
    assert relative_rms(TRUTH, TRUTH) == 0


def test_the_worst_position_is_named() -> None:
    actual = torch.tensor(TRUTH)
    actual[1, 0] = -2.0
    comparison = compare(actual, TRUTH)
    assert comparison.worst == (1, 0)
    assert comparison.worst_values == (-2.0, 0.0)
    assert comparison.max_abs == 2.0
    with pytest.raises(AssertionError, match=r"state float64 \(2, 2\): .* worst at \(1, 0\): -2, expected 0; allowed"):
        assert_close(actual, TRUTH, rms=1e-3, name="state")


@pytest.mark.parametrize("rms", [1e-3, 1e30, float("inf")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_or_infinity_on_one_side_never_passes(bad: float, rms: float) -> None:
    wrong = TRUTH.copy()
    wrong[0, 1] = bad
    for actual, expected in ((wrong, TRUTH), (TRUTH, wrong)):
        with pytest.raises(AssertionError, match=r"the first position that differs is \(0, 1\)"):
            assert_close(actual, expected, rms=rms)
        assert np.isnan(relative_rms(actual, expected))


def test_infinities_of_different_sign_differ() -> None:
    with pytest.raises(AssertionError):
        assert_close(np.array([np.inf, 1.0]), np.array([-np.inf, 1.0]), rms=1.0)


def test_equal_nan_sets_pass_and_the_rest_is_still_judged() -> None:
    expected = np.array([np.nan, np.inf, 1.0, 2.0])
    assert_close(expected.copy(), expected, rms=0.0)
    with pytest.raises(AssertionError):
        assert_close(np.array([np.nan, np.inf, 1.0, 3.0]), expected, rms=1e-3)


def test_an_error_that_is_itself_nan_does_not_pass() -> None:
    with pytest.raises(AssertionError):
        assert_close(TRUTH, TRUTH, rms=float("nan"))


def test_shapes_must_be_equal_not_just_broadcastable() -> None:
    with pytest.raises(AssertionError, match=r"out: shape \(1, 2\), expected \(2, 2\)"):
        assert_close(TRUTH[:1], TRUTH, rms=1.0)


def test_dtypes_must_be_equal_or_held_against_float64() -> None:
    assert_close(torch.ones(3, dtype=torch.bfloat16), np.ones(3), rms=0.0)
    with pytest.raises(AssertionError, match="dtype bfloat16, expected float32"):
        assert_close(torch.ones(3, dtype=torch.bfloat16), torch.ones(3), rms=0.0)
    with pytest.raises(TypeError, match="int64"):
        compare(np.ones(3, dtype=np.int64), np.ones(3))


def test_zero_and_empty_truths() -> None:
    assert relative_rms(np.zeros(3), np.zeros(3)) == 0
    assert relative_rms(np.array([0.0, 1e-30]), np.zeros(2)) == float("inf")
    assert relative_rms(np.zeros((0, 4)), np.zeros((0, 4))) == 0


@pytest.mark.parametrize("magnitude", [1e-200, 1e200])
def test_squares_neither_vanish_nor_overflow(magnitude: float) -> None:
    assert relative_rms(TRUTH * magnitude * 1.01, TRUTH * magnitude) == pytest.approx(0.01)


def test_tolerances_come_from_rounding_to_bf16() -> None:
    truth = np.full(100, 1.0 + 2**-9)  # rounds down to 1 in bf16
    rounding = 2**-9 / (1.0 + 2**-9)
    assert output_tolerance(truth) == pytest.approx(1.05 * rounding + 1e-4)
    assert state_tolerance(truth, torch.float32) == 1e-5
    assert state_tolerance(truth, torch.bfloat16) == pytest.approx(1.05 * rounding + 1e-5)
