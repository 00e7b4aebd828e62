"""Comparing a result with the truth: shapes, dtypes, NaN and Inf sets, relative RMS error and the worst position.

A NaN never passes silently: every measure of two arrays whose NaN sets differ fails, whatever the tolerance.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found. Errors are over the positions where both sides are finite."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # (actual, expected), as in every pair below
    dtypes: tuple[str, str]
    nan_counts: tuple[int, int]
    inf_counts: tuple[int, int]
    same_nonfinite: bool  # NaN, +Inf and -Inf at the same positions
    first_nonfinite_difference: tuple[int, ...] | None
    rms: float  # relative: |actual - expected| / |expected|, Euclidean norms
    max_abs: float
    worst: tuple[int, ...] | None  # index of the largest absolute error
    worst_values: tuple[float, float] | None

    @property
    def same_shape(self) -> bool:
        return self.shapes[0] == self.shapes[1]

    @property
    def same_dtype(self) -> bool:
        """Equal dtypes, or a float64 truth on the right, which any floating dtype may be held against."""
        return self.dtypes[0] == self.dtypes[1] or self.dtypes[1] == "float64"

    def describe(self) -> str:
        """One line for people: what differs and where."""
        if not self.same_shape:
            return f"shape {self.shapes[0]}, expected {self.shapes[1]}"
        text = f"relative RMS error {self.rms:.3e}"
        if self.worst is not None:
            actual, expected = self.worst_values
            text += f", worst at {self.worst}: {actual:.6g}, expected {expected:.6g}"
        if not self.same_nonfinite:
            text += (
                f"; NaN {self.nan_counts[0]}, expected {self.nan_counts[1]}; Inf {self.inf_counts[0]}, expected "
                f"{self.inf_counts[1]}; the first position that differs is {self.first_nonfinite_difference}"
            )
        return text


def compare(actual: Any, expected: Any) -> Comparison:
    """Compares two tensors or arrays of any floating dtypes, evaluated in float64. Never raises for what it finds."""
    dtypes = (_dtype_name(actual), _dtype_name(expected))
    a, e = _float64(actual), _float64(expected)
    nan_counts = (int(np.isnan(a).sum()), int(np.isnan(e).sum()))
    inf_counts = (int(np.isinf(a).sum()), int(np.isinf(e).sum()))
    if a.shape != e.shape:
        return Comparison((a.shape, e.shape), dtypes, nan_counts, inf_counts, False, None, np.nan, np.nan, None, None)

    finite = np.isfinite(a) & np.isfinite(e)
    same = finite | (np.isnan(a) & np.isnan(e)) | (a == e)
    error = np.where(finite, np.abs(np.where(finite, a, 0.0) - np.where(finite, e, 0.0)), 0.0)
    worst = _index(error.argmax(), a.shape) if error.size and error.any() else None
    return Comparison(
        shapes=(a.shape, e.shape),
        dtypes=dtypes,
        nan_counts=nan_counts,
        inf_counts=inf_counts,
        same_nonfinite=bool(same.all()),
        first_nonfinite_difference=None if same.all() else _index((~same).argmax(), a.shape),
        rms=_norm_ratio(error, np.where(finite, e, 0.0)),
        max_abs=float(error.max()) if error.size else 0.0,
        worst=worst,
        worst_values=None if worst is None else (float(a[worst]), float(e[worst])),
    )


def relative_rms(actual: Any, expected: Any) -> float:
    """|actual - expected| / |expected| over the entries finite in both; NaN when shapes or NaN/Inf sets differ.

    0 where both are zero everywhere (or empty), infinite where only ``expected`` is zero.
    """
    comparison = compare(actual, expected)
    return comparison.rms if comparison.same_nonfinite else float("nan")


def assert_close(actual: Any, expected: Any, *, rms: float, name: str = "out") -> None:
    """Raises AssertionError unless shapes, dtypes and NaN/Inf sets are equal and the relative RMS error is <= ``rms``.

    Dtypes must be equal, except that a float64 ``expected`` is a truth for every floating dtype.
    """
    comparison = compare(actual, expected)
    if not comparison.same_shape:
        raise AssertionError(f"{name}: {comparison.describe()}")
    if not comparison.same_dtype:
        raise AssertionError(
            f"{name}: dtype {comparison.dtypes[0]}, expected {comparison.dtypes[1]} (or a float64 truth)"
        )
    if not (comparison.same_nonfinite and comparison.rms <= rms):
        raise AssertionError(
            f"{name} {comparison.dtypes[0]} {comparison.shapes[0]}: {comparison.describe()}; allowed {rms:.3e}"
        )


def output_tolerance(expected: Any) -> float:
    """Largest error of a step with fp32 arithmetic: 1.05 times what rounding the truth to bf16 costs, plus 1e-4."""
    return 1.05 * _bf16_rounding_error(expected) + 1e-4


def state_tolerance(expected: Any, dtype: torch.dtype) -> float:
    """Largest error of a final state that was kept in fp32: 1e-5, plus its own rounding if it is returned in bf16."""
    return 1e-5 + (1.05 * _bf16_rounding_error(expected) if dtype == torch.bfloat16 else 0.0)


def _bf16_rounding_error(expected: Any) -> float:
    truth = _float64(expected)
    return compare(torch.from_numpy(truth).bfloat16(), truth).rms


def _norm_ratio(error: np.ndarray, expected: np.ndarray) -> float:
    largest = max(np.abs(error).max(initial=0.0), np.abs(expected).max(initial=0.0))
    if largest == 0.0:
        return 0.0
    # Scaled, so that squares neither overflow nor vanish.
    squares = np.square(error / largest).sum(), np.square(expected / largest).sum()
    return float(np.sqrt(squares[0] / squares[1])) if squares[1] else float("inf")


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _dtype_name(values: Any) -> str:
    if not isinstance(values, (torch.Tensor, np.ndarray, np.generic)):
        raise TypeError(f"cannot compare a {type(values).__name__}; expected a torch.Tensor or a NumPy array")
    return str(values.dtype).removeprefix("torch.")


def _float64(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    if not np.issubdtype(values.dtype, np.floating):
        raise TypeError(f"cannot compare {values.dtype} values; expected a floating dtype")
    return values.astype(np.float64, copy=False)
