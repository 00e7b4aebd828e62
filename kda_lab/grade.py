"""Scores of submitted notebooks: every exercise is checked again, each submission in a process of its own with limits.

    grade.grade("submitted/")             # one Submission for each notebook below it
    grade.as_csv(submissions), grade.as_json(submissions)

Of a notebook the cells that only import or define something are run, and the stubs (by nbgrader's cell metadata); not
its check cells, which a submission may have changed, and not the lesson. Then the package's own checks look at what the
functions do. An answer that crashes, hangs or eats memory loses its own points, not those of the others.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kda_lab import exercises, sandbox
from kda_lab.exercises.exercise import Exercise, Wrong

SECONDS, MEGABYTES = 120.0, 2048  # that one submission may take


@dataclasses.dataclass(frozen=True)
class Score:
    """One exercise of a submission."""

    exercise: str  # "3.2"
    points: float
    max_points: float
    message: str  # "" where it is right, else the hint or how it ended


@dataclasses.dataclass(frozen=True)
class Submission:
    """One notebook, and what it got."""

    notebook: str  # relative to the folder that is graded
    scores: tuple[Score, ...]
    failure: str = ""  # why it was not graded at all

    @property
    def points(self) -> float:
        return sum(score.points for score in self.scores)

    @property
    def max_points(self) -> float:
        return sum(score.max_points for score in self.scores)


def grade(
    path: str | Path,
    *,
    seconds: float = SECONDS,
    megabytes: int = MEGABYTES,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Submission]:
    """Grades a notebook, or every notebook below a folder (such as nbgrader's ``submitted``), in order of their names.

    Raises FileNotFoundError for a path that is not there, ValueError for a file that is no notebook and for a folder
    without one.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    if path.is_file() and path.suffix != ".ipynb":
        raise ValueError(f"{path} is not a notebook; expected a file that ends in .ipynb, or a folder of such files")
    root = path if path.is_dir() else path.parent
    notebooks = [path] if path.is_file() else sorted(path.rglob("*.ipynb"))
    notebooks = [notebook for notebook in notebooks if ".ipynb_checkpoints" not in notebook.parts]
    if not notebooks:
        raise ValueError(f"{path} has no notebook (*.ipynb) in it")
    submissions = []
    for notebook in notebooks:
        name = str(notebook.relative_to(root))
        progress(name)
        submissions.append(_grade_one(notebook, name, seconds, megabytes))
    return submissions


def as_json(submissions: Sequence[Submission]) -> str:
    """A list of submissions with their points and the scores of every exercise."""
    content = [
        dataclasses.asdict(submission) | {"points": submission.points, "max_points": submission.max_points}
        for submission in submissions
    ]
    return json.dumps(content, indent=2)


def as_csv(submissions: Sequence[Submission]) -> str:
    """A line for every exercise of every submission, with a heading."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["notebook", "exercise", "points", "max_points", "message"])
    for submission in submissions:
        if submission.failure:
            writer.writerow([submission.notebook, "", 0, "", submission.failure])
        for score in submission.scores:
            writer.writerow([submission.notebook, *dataclasses.astuple(score)])
    return text.getvalue()


def format_table(submissions: Sequence[Submission]) -> str:
    """A line for each submission: its points, and the exercises that are not right."""
    lines = []
    for submission in submissions:
        missing = ", ".join(score.exercise for score in submission.scores if score.points < score.max_points)
        rest = submission.failure or (f"not yet: {missing}" if missing else "all right")
        lines.append(f"{submission.points:5g} of {submission.max_points:g}  {submission.notebook}  ({rest})")
    return "\n".join(lines)


def _grade_one(notebook: Path, name: str, seconds: float, megabytes: int) -> Submission:
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        asked = _asked(cells)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return Submission(name, (), f"cannot be read as a notebook: {type(error).__name__}: {error}")
    if not asked:
        return Submission(name, (), "has no exercise of this course (no cell metadata that names one)")
    scores: dict[str, Score] = {}
    while open_ := [exercise for exercise in asked if exercise.id not in scores]:
        found, failure = _run(notebook, [exercise.id for exercise in open_], seconds, megabytes)
        scores |= found
        rest = [exercise for exercise in open_ if exercise.id not in found]
        for exercise in rest[:1] if found or not failure.startswith(_CELLS) else rest:  # the one that ended the process
            scores[exercise.id] = Score(exercise.id, 0.0, exercise.points, failure)
    return Submission(name, tuple(scores[exercise.id] for exercise in asked))


_CELLS = "Its cells: "


def _run(notebook: Path, ids: list[str], seconds: float, megabytes: int) -> tuple[dict[str, Score], str]:
    """The scores of the exercises that were reached, and how the process ended where it did not reach all."""
    with tempfile.TemporaryDirectory(prefix="kda_lab-") as folder:
        log = Path(folder) / "scores"
        arguments = ["-m", "kda_lab.grade", str(notebook.resolve()), str(log), str(seconds), str(megabytes), *ids]
        outcome = sandbox.run(arguments, seconds=seconds)
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    events = [json.loads(line) for line in lines]
    scores = {event["exercise"]: Score(**event) for event in events if "exercise" in event}
    failure = outcome.failure or "It ended the process."
    return scores, failure if {"ran": True} in events else _CELLS + failure


def _asked(cells: list[dict[str, Any]]) -> list[Exercise]:
    """All exercises of the lessons that a notebook has exercise cells of: deleting a check cell saves nothing."""
    names = [cell.get("metadata", {}).get("nbgrader", {}).get("grade_id", "") for cell in cells]
    lessons = {int(match[1]) for name in names if (match := re.match(r"exercise-(\d+)-\d+", name))}
    return [exercise for lesson in sorted(lessons) for exercise in exercises.lesson(lesson)]


# In the process with limits from here on.
def _main(notebook: str, log: str, seconds: str, megabytes: str, *ids: str) -> None:
    os.environ["KDA_LAB_SOLUTIONS"] = "0"
    found = [exercises.get(id) for id in ids]
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    os.chdir(Path(notebook).parent)
    with open(log, "a", encoding="utf-8") as file:

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        sandbox.limit(float(seconds), int(megabytes))
        namespace: dict[str, Any] = {"__name__": "__main__"}
        errors = _run_cells(cells, namespace)
        tell({"ran": True})
        for exercise in found:
            points, message = _score(exercise, namespace, errors)
            tell(dataclasses.asdict(Score(exercise.id, points, exercise.points, message)))
    os._exit(0)


def _run_cells(cells: list[dict[str, Any]], namespace: dict[str, Any]) -> dict[str, str]:
    """Runs stubs, imports and definitions; returns the errors of stubs, by grade_id."""
    errors = {}
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        source, metadata = "".join(cell["source"]), cell.get("metadata", {}).get("nbgrader", {})
        if not (metadata.get("solution") or _only_defines(source)):
            continue
        try:
            exec(compile(source, "<cell>", "exec"), namespace)
        except Exception as error:
            errors[metadata.get("grade_id", "")] = f"{type(error).__name__}: {error}"
    return errors


def _only_defines(source: str) -> bool:
    """Whether a cell holds nothing but imports and definitions."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # magics, or an unfinished cell
        return False
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return bool(body) and all(isinstance(statement, kinds) for statement in body)


def _score(exercise: Exercise, namespace: dict[str, Any], errors: dict[str, str]) -> tuple[float, str]:
    if exercise.name not in namespace:
        error = errors.get(f"exercise-{exercise.id.replace('.', '-')}")
        return 0.0, error or f"{exercise.name} is not defined."
    try:
        exercise.check(namespace[exercise.name])
    except Wrong as wrong:
        return 0.0, str(wrong)
    except MemoryError:
        return 0.0, "It asked for more memory than it may have."
    return float(exercise.points), ""


if __name__ == "__main__":
    _main(*sys.argv[1:])
