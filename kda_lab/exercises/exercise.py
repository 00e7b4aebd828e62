"""One exercise: what is asked, the check that answers with a hint, and the solution that the stub comes from."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

READ, COUNT, MEASURE, WRITE = "reading", "counting", "measuring", "writing"


class Wrong(AssertionError):
    """An answer is not right (yet); the text is a hint."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a right answer costs, beside what the solution does; less is better."""

    value: float
    solution: float
    unit: str

    def __str__(self) -> str:
        return f"cost {self.value:g} {self.unit}; the solution's is {self.solution:g}"


@dataclasses.dataclass(frozen=True)
class Exercise:
    """An exercise whose answer is a function with the solution's name, parameters and docstring.

    ``judge(answer)`` raises Wrong with a hint, or returns; it may return a Cost.
    """

    id: str  # "3.2": lesson and number
    title: str
    kind: str
    spec: str  # Markdown
    solution: Callable[..., Any]
    judge: Callable[[Callable[..., Any]], Cost | None]
    hints: tuple[str, ...]
    points: int = 1

    @property
    def lesson(self) -> int:
        return int(self.id.split(".")[0])

    @property
    def name(self) -> str:
        """What the reader's function is called."""
        return self.solution.__name__

    @property
    def stub(self) -> str:
        """The solution's head and docstring, and a body that is to be written."""
        lines = self.solution_source.splitlines()
        docstring = ast.parse(self.solution_source).body[0].body[0]
        return "\n".join([*lines[: docstring.end_lineno], "    ...  # your code"])

    @property
    def solution_source(self) -> str:
        return textwrap.dedent(inspect.getsource(self.solution)).rstrip()

    def check(self, answer: Callable[..., Any]) -> Cost | None:
        """Returns the cost (None where there is none) of a right answer; raises Wrong with a hint for any other."""
        if not callable(answer):
            raise Wrong(f"{self.name} is {answer!r}; expected a function, as in the stub.")

        def answered(*args: Any, **kwargs: Any) -> Any:
            try:
                value = answer(*args, **kwargs)
            except Wrong:
                raise
            except Exception as error:  # whatever the reader's code raises is an answer that is not right yet
                raise Wrong(f"{self.name} raised {type(error).__name__}: {error}") from error
            if value is None or value is Ellipsis:
                raise Wrong(f"{self.name} returns nothing yet: replace the dots by your code, and return the result.")
            return value

        try:
            return self.judge(answered)
        except Wrong:
            raise
        except Exception as error:  # a value of a kind that nobody thought of
            raise Wrong(f"What {self.name} returns cannot be judged: {type(error).__name__}: {error}") from error


def expect(condition: bool, hint: str) -> None:
    """Raises Wrong with the hint unless the condition holds."""
    if not condition:
        raise Wrong(hint)


def expect_close(actual: Any, expected: Any, mistakes: Mapping[str, Any], otherwise: str) -> None:
    """Raises Wrong unless ``actual`` is ``expected`` to rounding.

    mistakes: hint -> the value that a plausible mistake leads to; the first that fits is the hint that is given.
    """
    expect(_is_numeric(actual), f"A number or an array is expected, not {type(actual).__name__}.")
    actual = np.asarray(actual, dtype=float)
    if _equal(actual, expected):
        return
    for hint, value in mistakes.items():
        expect(not _equal(actual, value), hint)
    shape = np.shape(expected)
    expect(actual.shape == shape, f"The result has shape {actual.shape}; expected {shape}.")
    raise Wrong(otherwise)


def expect_choice(actual: Any, expected: Any, choices: Sequence[Any], hints: Mapping[Any, str]) -> None:
    """Raises Wrong unless ``actual`` is ``expected``; another of the choices gets its own hint."""
    known = type(actual) in {type(choice) for choice in choices} and actual in choices
    expect(known, f"The answer is {actual!r}; expected one of {', '.join(map(repr, choices))}.")
    expect(actual == expected, hints.get(actual, f"{actual!r} is not it."))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, the same for a seed."""
    return np.random.default_rng(seed).standard_normal(shape)


def _is_numeric(value: Any) -> bool:
    try:
        np.asarray(value, dtype=float)
    except (TypeError, ValueError, RuntimeError):  # a tensor that requires grad raises the last
        return False
    return True


def _equal(actual: np.ndarray, expected: Any) -> bool:
    expected = np.asarray(expected, dtype=float)
    return actual.shape == expected.shape and np.allclose(actual, expected, rtol=1e-6, atol=1e-12, equal_nan=True)
