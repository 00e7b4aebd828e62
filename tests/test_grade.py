"""Grading: what stubs, solutions, mistakes and hostile answers get, and that one answer costs no other its points."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from kda_lab import claims, cli, exercises, grade
from kda_lab.exercises import notebook as cells


def lesson(number: int, **changes: str) -> nbformat.NotebookNode:
    """A notebook with a lesson's exercises solved; changes: other sources for stubs, by the function's name."""
    notebook = new_notebook(cells=[new_markdown_cell("# A lesson", id="a"), new_markdown_cell("## An end?", id="z")])
    cells.insert(notebook, number)
    cells.solve(notebook)
    for cell in notebook.cells:
        for name, source in changes.items():
            if cell.source.startswith(f"def {name}("):
                cell.source = source
    return notebook


def write(path, notebook) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


def points(submission) -> dict[str, float]:
    return {score.exercise: score.points for score in submission.scores}


def messages(submission) -> dict[str, str]:
    return {score.exercise: score.message for score in submission.scores}


FULL = {"3.1": 1.0, "3.2": 2.0, "3.3": 2.0}


def test_submissions_are_graded_each_for_itself(tmp_path):
    """nbgrader's layout: submitted/STUDENT/ASSIGNMENT/NOTEBOOK."""
    solved, name = lesson(3), "03_factored.ipynb"
    write(tmp_path / "ada" / "3" / name, solved)
    untouched = new_notebook(cells=[new_markdown_cell("# A lesson", id="a"), new_markdown_cell("## An end?", id="z")])
    cells.insert(untouched, 3)
    write(tmp_path / "bob" / "3" / name, untouched)
    write(tmp_path / "eve" / "3" / name, lesson(3, lowest_bound="def lowest_bound(chunk, x):\n    while True: pass"))
    (tmp_path / "mallory").mkdir()
    (tmp_path / "mallory" / name).write_text('{"no": "notebook"}')
    write(tmp_path / "ada" / ".ipynb_checkpoints" / name, solved)

    ada, bob, eve, mallory = grade.grade(tmp_path, seconds=6)
    assert ada.notebook == "ada/3/03_factored.ipynb"
    assert points(ada) == FULL
    assert (ada.points, ada.max_points) == (5.0, 5)
    assert points(bob) == dict.fromkeys(FULL, 0.0)
    assert all("returns nothing yet" in message for message in messages(bob).values())
    assert points(eve) == FULL | {"3.1": 0.0}
    assert "did not end within 6 s" in messages(eve)["3.1"]
    assert mallory.failure.startswith("cannot be read as a notebook")


HOSTILE = {
    "crash": ("import ctypes\n    ctypes.string_at(0)", "SIGSEGV"),
    "exit": ("import os\n    os._exit(0)", "ended the process"),
    "memory": ("return [bytearray(2**28) for _ in range(64)]", "memory|MemoryError"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_answer_loses_its_own_points(tmp_path, kind):
    body, message = HOSTILE[kind]
    path = tmp_path / "03_factored.ipynb"
    write(path, lesson(3, factored_Mqk=f"def factored_Mqk(*arguments):\n    {body}"))
    (submission,) = grade.grade(path)
    assert points(submission) == FULL | {"3.2": 0.0}
    assert any(part in messages(submission)["3.2"] for part in message.split("|")), messages(submission)


def test_a_changed_check_cell_or_score_changes_nothing(tmp_path):
    notebook = lesson(3, lowest_bound="def lowest_bound(chunk, x):\n    return 0.5")
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.source = "1.0"
    notebook.cells.insert(2, new_code_cell("exercises.score = print", id="cheat"))
    write(tmp_path / "a.ipynb", notebook)
    assert points(grade.grade(tmp_path / "a.ipynb")[0]) == FULL | {"3.1": 0.0}


def test_lesson_cells_are_not_run_and_definitions_are(tmp_path):
    body = "def lowest_bound(chunk, largest_log):\n    return helper(chunk, largest_log)"
    notebook = lesson(3, lowest_bound=body)
    notebook.cells.insert(1, new_code_cell("def helper(chunk, x):\n    return -x / chunk", id="helper"))
    notebook.cells.insert(1, new_code_cell("%time print(1)", id="magic"))
    notebook.cells.insert(1, new_code_cell("while True:\n    pass", id="slow"))
    write(tmp_path / "a.ipynb", notebook)
    assert points(grade.grade(tmp_path / "a.ipynb")[0]) == FULL


def test_an_unfinished_cell_is_named(tmp_path):
    write(tmp_path / "a.ipynb", lesson(3, lowest_bound="def lowest_bound(chunk, x):\n    return ("))
    (submission,) = grade.grade(tmp_path / "a.ipynb")
    assert points(submission) == FULL | {"3.1": 0.0}
    assert "SyntaxError" in messages(submission)["3.1"]


def test_command_writes_json_csv_and_text(tmp_path, capsys):
    write(tmp_path / "03_factored.ipynb", lesson(3, lowest_bound="def lowest_bound(chunk, x):\n    return x / chunk"))
    write(tmp_path / "empty.ipynb", new_notebook())
    assert cli.main(["grade", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [(entry["points"], entry["max_points"]) for entry in content] == [(4.0, 5), (0, 0)]
    assert content[0]["scores"][0] == {
        "exercise": "3.1",
        "points": 0.0,
        "max_points": 1,
        "message": "A bound is a logarithm of a decay, so it is negative.",
    }
    submissions = [
        grade.Submission(entry["notebook"], tuple(grade.Score(**score) for score in entry["scores"]), entry["failure"])
        for entry in content
    ]
    rows = list(csv.DictReader(io.StringIO(grade.as_csv(submissions))))
    assert [(row["exercise"], row["points"]) for row in rows] == [
        ("3.1", "0.0"),
        ("3.2", "2.0"),
        ("3.3", "2.0"),
        ("", "0"),
    ]
    assert "4 of 5  03_factored.ipynb  (not yet: 3.1)" in grade.format_table(submissions)
    assert cli.main(["grade", str(tmp_path / "nowhere")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_cells_carry_what_nbgrader_reads():
    notebook = lesson(3)
    graded = [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]
    stubs = [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("solution")]
    assert [cell.metadata.nbgrader.points for cell in graded] == [1, 2, 2]
    assert all(cell.metadata.nbgrader.locked and cell.metadata.nbgrader.schema_version == 3 for cell in graded)
    assert [f"{cell.id}-check" for cell in stubs] == [cell.id for cell in graded]
    assert len({cell.metadata.nbgrader.grade_id for cell in graded + stubs}) == 6
    nbformat.validate(notebook)


def test_inserting_again_changes_nothing(tmp_path):
    path = tmp_path / "03_factored.ipynb"
    write(path, new_notebook(cells=[new_markdown_cell("# A lesson", id="a"), new_markdown_cell("## An end?", id="z")]))
    cells.main([str(path)])
    once = path.read_text(encoding="utf-8")
    cells.main([str(path)])
    assert path.read_text(encoding="utf-8") == once
    assert nbformat.reads(once, 4).cells[-1].source == "## An end?"
    assert once.count("exercises.score(") == len(exercises.lesson(3))


def test_the_lecturers_guide_names_what_there_is():
    guide = Path(__file__).resolve().parents[1] / "docs" / "lecturers.md"
    text = guide.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (guide.parent / target).exists(), target
    for id in re.findall(r"exercise (\d\.\d)", text):
        assert exercises.get(id)
    for number in re.findall(r"claim (\d+)", text):
        assert int(number) in claims.CLAIMS
    helped = subprocess.run([sys.executable, "-m", "kda_lab.cli", "--help"], capture_output=True, text=True).stdout
    for command in re.findall(r"kda-lab (\w+)", text):
        assert re.search(rf"^    {command}\b", helped, re.MULTILINE), command


def test_what_is_no_notebook_is_said_and_fails(tmp_path, capsys):
    script, broken = tmp_path / "answers.py", tmp_path / "broken.ipynb"
    script.write_text("def lowest_bound(chunk, x): ...")
    broken.write_text("{}")
    assert cli.main(["grade", str(script)]) == 2
    assert "answers.py is not a notebook; expected a file that ends in .ipynb" in capsys.readouterr().err
    assert cli.main(["grade", str(broken)]) == 1
    assert "cannot be read as a notebook" in capsys.readouterr().out
