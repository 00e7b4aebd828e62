"""Exercises of every lesson: a spec, a stub, a check that answers with a hint, and a solution.

    exercises.lesson(3)[0].check(lowest_bound)    # returns, or raises Wrong with a hint
    exercises.score("3.1", lowest_bound)          # in a notebook: shows the result or the hint, returns the points
    exercises.progress()                          # {"3.1": 1.0, ...}: what was scored since the notebook started

An answer is a function. A stub never passes. KDA_LAB_SOLUTIONS=0 keeps `score` from offering the solution.
"""

from __future__ import annotations

import html
import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from kda_lab.exercises.exercise import COUNT, MEASURE, READ, WRITE, Cost, Exercise, Wrong
from kda_lab.show import Html

__all__ = [
    "COUNT",
    "LESSONS",
    "MEASURE",
    "READ",
    "WRITE",
    "Cost",
    "Exercise",
    "Wrong",
    "get",
    "lesson",
    "progress",
    "score",
]

LESSONS = range(10)

_progress: dict[str, float] = {}


def lesson(number: int) -> tuple[Exercise, ...]:
    """The exercises of a lesson, in order. Raises ValueError where there is no such lesson."""
    if number not in LESSONS:
        raise ValueError(f"lesson is {number!r}; expected 0 to {LESSONS[-1]}")
    return importlib.import_module(f"kda_lab.exercises.lesson_{number:02}").EXERCISES


def get(id: str) -> Exercise:
    """The exercise "3.2". Raises ValueError where there is no such exercise."""
    number, _, _ = id.partition(".")
    found = [exercise for exercise in lesson(int(number)) if exercise.id == id] if number.isdecimal() else []
    if not found:
        raise ValueError(f"exercise is {id!r}; expected a lesson and a number, such as '3.2'")
    return found[0]


def score(id: str, answer: Callable[..., Any]) -> float:
    """Checks an answer, shows the result or a hint with folded help, and returns the points: 0 or all of them.

    It raises nothing for a wrong answer, so that a notebook runs to its end; as a cell's value, the points are what
    nbgrader's autograder reads.
    """
    exercise = get(id)
    try:
        cost = exercise.check(answer)
    except Wrong as wrong:
        points = 0.0
        _show(_not_yet(exercise, str(wrong)))
    else:
        points = float(exercise.points)
        text = f"✓ {id} {exercise.title}: right." + (f" ({cost})" if cost else "")
        _show(Html(f"<p>{html.escape(text)}</p>", text))
    _progress[id] = points
    return points


def progress() -> dict[str, float]:
    """Points of every exercise that was scored in this process, by id."""
    return dict(sorted(_progress.items()))


def _not_yet(exercise: Exercise, hint: str) -> Html:
    text = f"✗ {exercise.id} {exercise.title}: not yet. {hint}"
    folded = [(f"Hint {number}", f"<p>{_with_code(hint)}</p>") for number, hint in enumerate(exercise.hints, 1)]
    if os.environ.get("KDA_LAB_SOLUTIONS") != "0":
        folded.append(("Solution", f"<pre>{html.escape(exercise.solution_source)}</pre>"))
    details = "".join(f"<details><summary>{summary}</summary>{body}</details>" for summary, body in folded)
    return Html(f"<p>{html.escape(text)}</p>{details}", text)


def _with_code(text: str) -> str:
    """Markup of a text in which code stands between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _show(result: Html) -> None:
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
        from IPython.display import display

        display(result)
    else:
        print(result)
