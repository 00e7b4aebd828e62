"""nbgrader: the lessons' cell metadata is what it asks for, and its autograder gives the points that grade gives.

nbgrader is no dependency; the second half runs where somebody has installed it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

from kda_lab import exercises, grade
from kda_lab.exercises import notebook as cells
from kda_lab.tour import find_lessons

LESSONS = find_lessons()
GUIDE = Path(__file__).parents[1] / "docs" / "lecturers.md"


def metadata_of(path: Path) -> dict[str, dict]:
    found = [cell for cell in nbformat.read(path, as_version=4).cells if "nbgrader" in cell.metadata]
    assert all(cell.cell_type == "code" for cell in found)
    ids = [cell.metadata["nbgrader"]["grade_id"] for cell in found]
    assert len(set(ids)) == len(ids), "nbgrader refuses a notebook in which a grade_id occurs twice"
    return {id: cell.metadata["nbgrader"] for id, cell in zip(ids, found)}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_metadata_is_what_nbgrader_asks_for(path):
    """Schema 3: all five flags, points where and only where something is graded, a locked check after its stub."""
    found = metadata_of(path)
    for id, fields in found.items():
        assert re.fullmatch(r"[a-zA-Z0-9_\-]+", id), "what nbgrader allows in a grade_id"
        assert fields["schema_version"] == 3
        assert {name: type(fields[name]) for name in ("grade", "solution", "locked", "task")} == dict.fromkeys(
            ("grade", "solution", "locked", "task"), bool
        )
        assert not fields["task"]
        assert fields["grade"] != fields["solution"]
        assert fields["locked"] == fields["grade"], "the check is locked, the stub is not"
        assert ("points" in fields) == fields["grade"]
        assert set(fields) <= {"grade", "grade_id", "locked", "points", "schema_version", "solution", "task"}
    number = int(path.name[:2])
    assert {id: fields["points"] for id, fields in found.items() if fields["grade"]} == {
        f"exercise-{exercise.id.replace('.', '-')}-check": exercise.points for exercise in exercises.lesson(number)
    }
    stubs = [id for id, fields in found.items() if fields["solution"]]
    assert [id for id in found if id.endswith("-check")] == [f"{id}-check" for id in stubs]


def configuration() -> str:
    """The nbgrader_config.py of the guide for lecturers."""
    return re.search(r"```python\n(c = get_config\(\)\n.+?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[1]


def test_the_guide_keeps_the_stubs():
    assert "c.ClearSolutions.enabled = False" in configuration()


def nbgrader(course: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "nbgrader", *arguments]
    done = subprocess.run(command, cwd=course, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_autograde_gives_the_points_that_grade_gives(tmp_path):
    api = pytest.importorskip("nbgrader.api", reason="nbgrader is not installed")
    (tmp_path / "nbgrader_config.py").write_text(configuration(), encoding="utf-8")
    name = "03_factored.ipynb"
    lesson = new_notebook(cells=[new_markdown_cell("# A lesson", id="a"), new_markdown_cell("## An end?", id="z")])
    lesson.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells.insert(lesson, 3)
    source = tmp_path / "source" / "3" / name
    source.parent.mkdir(parents=True)
    nbformat.write(lesson, source)
    nbgrader(tmp_path, "generate_assignment", "3")

    solved, changed = (nbformat.read(tmp_path / "release" / "3" / name, as_version=4) for _ in range(2))
    assert "your code" in solved.cells[4].source, "the stub is still there"
    cells.solve(solved)
    solved.cells[4].source = "def lowest_bound(chunk, largest_log):\n    return largest_log / chunk"
    changed.cells[5].source = "1.0"  # the check
    for student, submission in (("ada", solved), ("eve", changed)):
        path = tmp_path / "submitted" / student / "3" / name
        path.parent.mkdir(parents=True)
        nbformat.write(submission, path)
    nbgrader(tmp_path, "autograde", "3")

    with api.Gradebook(f"sqlite:///{tmp_path}/gradebook.db") as gradebook:
        theirs = {s.student.id: s.score for s in gradebook.assignment_submissions("3")}
    ours = {Path(s.notebook).parts[0]: s.points for s in grade.grade(tmp_path / "submitted")}
    assert theirs == ours == {"ada": 4.0, "eve": 0.0}
