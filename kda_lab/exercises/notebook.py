"""Exercises as notebook cells, with the metadata that nbgrader's autograder and ``kda-lab grade`` go by.

``python -m kda_lab.exercises.notebook notebooks/03_factored.ipynb`` puts a lesson's exercises before its open question,
or brings those that are there up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

from kda_lab import exercises
from kda_lab.exercises.exercise import Exercise

INTRODUCTION = """## Exercises

Write each answer into its stub and run the cell below it. A wrong answer gets a hint; more hints, and the solution,
are folded under it. The number is your points. Nothing here stops the notebook."""

IMPORTS = """import math

import numpy as np
import torch

from kda_lab import exercises"""

_PREFIX = "exercise-"


def cells(lesson: int) -> list[nbformat.NotebookNode]:
    """The cells of a lesson's exercises: an introduction, then spec, stub and check of each."""
    found = [
        new_markdown_cell(INTRODUCTION, id=f"{_PREFIX}{lesson}"),
        new_code_cell(IMPORTS, id=f"{_PREFIX}{lesson}-import"),
    ]
    for exercise in exercises.lesson(lesson):
        found += _cells(exercise)
    return found


def insert(notebook: nbformat.NotebookNode, lesson: int) -> None:
    """Puts a lesson's exercises before the notebook's last cell, in the place of those that are there."""
    others = [cell for cell in notebook.cells if not cell.id.startswith(_PREFIX)]
    notebook.cells = [*others[:-1], *cells(lesson), others[-1]]


def solve(notebook: nbformat.NotebookNode) -> None:
    """Puts every solution into its stub."""
    for cell in notebook.cells:
        metadata = cell.metadata.get("nbgrader", {})
        if metadata.get("solution"):
            lesson, number = metadata["grade_id"].removeprefix(_PREFIX).split("-")
            cell.source = exercises.get(f"{lesson}.{number}").solution_source


def check_source(exercise: Exercise) -> str:
    return f'exercises.score("{exercise.id}", {exercise.name})'


def _cells(exercise: Exercise) -> list[nbformat.NotebookNode]:
    id = f"{_PREFIX}{exercise.id.replace('.', '-')}"
    points = f"{exercise.points} point{'s' if exercise.points > 1 else ''}"
    spec = f"### {exercise.id} · {exercise.title}\n\n{exercise.spec} *({exercise.kind}, {points})*"
    stub = new_code_cell(exercise.stub, id=id)
    stub.metadata["nbgrader"] = _metadata(id, solution=True)
    check = new_code_cell(check_source(exercise), id=f"{id}-check")
    check.metadata["nbgrader"] = _metadata(f"{id}-check", points=exercise.points)
    return [new_markdown_cell(spec, id=f"{id}-spec"), stub, check]


def _metadata(id: str, *, solution: bool = False, points: int | None = None) -> dict:
    grade = points is not None
    fields = {"grade": grade, "grade_id": id, "locked": grade, "schema_version": 3, "solution": solution, "task": False}
    return fields | ({"points": points} if grade else {})


def main(arguments: Sequence[str] | None = None) -> None:
    for name in sys.argv[1:] if arguments is None else arguments:
        path = Path(name)
        notebook = nbformat.read(path, as_version=4)
        insert(notebook, int(path.name.split("_")[0]))
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
