"""Counts what an answer computes: the cost of code is the same on every machine when operations are counted, not time.

    cost(answer, solution, lambda watch: (watch(S), k), unit="operations")

A watched array notes the arithmetic of everything that is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kda_lab.exercises.exercise import Cost

OPERATIONS, EXPONENTIALS = "operations", "exponentials"
_EXPONENTIALS = (np.exp, np.exp2, np.expm1)
_FREE = (np.negative, np.absolute, np.conjugate, np.isnan, np.isfinite)


class _Watched(np.ndarray):
    """An array whose operations, and those of what comes out of them, are counted in `counts`."""

    counts: dict[str, int]

    def __array_finalize__(self, parent: Any) -> None:
        if parent is not None:
            self.counts = getattr(parent, "counts", {OPERATIONS: 0, EXPONENTIALS: 0})

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        plain = [_plain(value) for value in inputs]
        if out is not None:
            options["out"] = tuple(_plain(value) for value in out)
        result = getattr(ufunc, method)(*plain, **options)
        if ufunc in _EXPONENTIALS:
            self.counts[EXPONENTIALS] += np.size(result)
        elif ufunc is np.matmul:
            self.counts[OPERATIONS] += _of_products(np.size(result), np.shape(plain[0])[-1])
        elif ufunc not in _FREE:
            self.counts[OPERATIONS] += np.size(plain[0]) if method == "reduce" else np.size(result)
        return out[0] if out is not None else self._watch(result)

    def __array_function__(self, func: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        plain = tuple(_plain(value) for value in args)
        result = func(*plain, **{name: _plain(value) for name, value in kwargs.items()})
        if func is np.outer:
            self.counts[OPERATIONS] += np.size(result)
        elif func in (np.dot, np.inner):
            self.counts[OPERATIONS] += _of_products(np.size(result), np.shape(plain[0])[-1])
        elif func is np.einsum:
            self.counts[OPERATIONS] += _of_einsum(*plain)
        elif func in (np.sum, np.cumsum):
            self.counts[OPERATIONS] += np.size(plain[0])
        return self._watch(result)

    def __getitem__(self, index: Any) -> Any:
        return self._watch(super().__getitem__(index))

    def _watch(self, result: Any) -> Any:
        """The result, watched: numbers, too, so that a loop over elements is counted as well."""
        if not isinstance(result, (np.ndarray, np.number)):
            return result
        watched = np.asarray(result).view(_Watched)
        watched.counts = self.counts
        return watched


def cost(
    answer: Callable[..., Any],
    solution: Callable[..., Any],
    arguments: Callable[[Callable[[np.ndarray], np.ndarray]], tuple[Any, ...]],
    unit: str,
    *,
    what: str = OPERATIONS,
    per: float = 1.0,
) -> Cost | None:
    """What an answer that is right computes, beside the solution, in so many for each `per`.

    arguments: returns the answer's, from a function that watches an array. what: OPERATIONS (additions, multiplications
    and the like; a product of matrices has two for each of its products) or EXPONENTIALS. None where nothing was seen:
    the answer computes in a way that this does not count.
    """
    try:
        found = _count(answer, arguments, what)
    except Exception:  # an answer that is right, and cannot do with a watched array
        return None
    if not found:
        return None
    return Cost(round(found / per, 2), round(_count(solution, arguments, what) / per, 2), unit)


def _count(function: Callable[..., Any], arguments: Callable, what: str) -> int:
    counts = {OPERATIONS: 0, EXPONENTIALS: 0}

    def watch(array: np.ndarray) -> np.ndarray:
        watched = array.copy().view(_Watched)
        watched.counts = counts
        return watched

    function(*arguments(watch))
    return counts[what]


def _plain(value: Any) -> Any:
    if isinstance(value, _Watched):
        return value.view(np.ndarray)
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _of_products(results: int, terms: int) -> int:
    return 2 * results * terms


def _of_einsum(subscripts: str, *operands: Any) -> int:
    """Products and sums over all indices of an einsum such as "id,jd->ij"."""
    sizes: dict[str, int] = {}
    for letters, operand in zip(subscripts.split("->")[0].split(","), operands):
        sizes |= dict(zip(letters.strip(), np.shape(operand)))
    return len(operands) * math.prod(sizes.values())
