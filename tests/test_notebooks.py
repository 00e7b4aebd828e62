"""The lessons: that they run, keep the format the project asks of a notebook, and say nothing that can be false."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import statistics
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from lessons import executed

from kda_lab import reference, registry, show
from kda_lab.show import find_function
from kda_lab.tour import find_lessons

LESSONS = find_lessons()


def cells(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


@pytest.fixture(params=LESSONS, ids=lambda path: path.stem)
def lesson(request) -> Path:
    return request.param


@pytest.fixture
def notebook(lesson) -> nbformat.NotebookNode:
    return nbformat.read(lesson, as_version=4)


def test_there_are_lessons():
    assert [path.stem for path in LESSONS[:4]] == ["00_start_here", "01_naive_exp", "02_rebased_ex2", "03_factored"]


def test_file_is_normalised_and_carries_no_results(lesson, notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"nbgrader"}, cell.id
        assert not cell.get("outputs"), cell.id
        assert cell.get("execution_count") is None, cell.id
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert lesson.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"


def test_code_cells_are_short_and_define_nothing(notebook):
    lines = [len(source.splitlines()) for source in cells(notebook, "code")]
    assert statistics.median(lines) <= 5
    assert max(lines) <= 30
    exercises = [cell.source for cell in notebook.cells if "nbgrader" in cell.metadata]  # where the reader defines
    for source in cells(notebook, "code"):
        if source in exercises:
            continue
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):  # magics are calls
            assert not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)), source
        assert not re.search(r"__global__|#include|#pragma", source), "kernel text belongs in csrc"


def test_every_figure_goes_through_show(notebook):
    for source in cells(notebook, "code"):
        assert source.count("_figure(") == len(re.findall(r"show\(plots\w*\.", source)), source


def test_opens_and_ends_as_a_lesson_should(notebook):
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    for part in ("# ", "You will see", "**You need**", "**Time**", "**The question.**"):
        assert part in first
    assert notebook.cells[-1].cell_type == "markdown"
    assert last.startswith("## An open question")
    assert "?" in last
    assert any("**Predict**" in source for source in cells(notebook, "markdown"))


def test_headings_are_in_order_and_name_stages_that_exist(notebook):
    headings = re.findall(r"^(#+) (.+)$", "\n".join(cells(notebook, "markdown")), flags=re.MULTILINE)
    levels = [len(marks) for marks, _ in headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for _, title in headings[1:]:
        for stage in re.findall(r"`(\w+)`", title):
            find_function(registry.get(1).sources["cpu"], stage)


def test_links_and_fields_resolve(lesson, notebook):
    text = "\n".join(cells(notebook, "markdown"))
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (lesson.parent / target).exists(), target
    fields = {field.name for field in dataclasses.fields(reference.Chunked)}
    table = re.search(r"^\| Stage \|.+?(?:\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    for row in table[0].strip().splitlines()[2:] if table else []:
        assert set(re.findall(r"`(\w+)`", row.split("|")[3])) <= fields, row


def test_the_published_kernel_is_linked_where_a_lesson_speaks_of_it(notebook):
    """Or shows its times. The glossary says what it is; the lesson says where."""
    text = "\n".join(cells(notebook, "markdown"))
    speaks = re.search(r"FlashKDA|published (kernel|design|GPU kernel)", text) or any(
        "views.race(" in source for source in cells(notebook, "code")
    )
    link = "[FlashKDA](https://github.com/MoonshotAI/FlashKDA)"
    assert not speaks or link in text
    mentions = re.findall(r"FlashKDA", text.replace("github.com/MoonshotAI/FlashKDA", ""))
    assert not mentions or text.index(link) <= text.index("FlashKDA"), "the first mention carries the link"


def test_what_is_shown_of_the_source_is_there(notebook):
    """A function or a marked line that a kernel lost would stop the lesson."""
    for source in cells(notebook, "code"):
        for call in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "source":
                arguments = [ast.literal_eval(value) for value in call.args]
                assert show.source(*arguments, **{word.arg: ast.literal_eval(word.value) for word in call.keywords})


def test_what_a_lesson_compares_runs_in_turn(notebook):
    """One program's samples after another's meet another machine: a busy one made step 3 slower than step 2."""
    for source in cells(notebook, "code"):
        assert "time_call" not in source, "bench.fastest_ms takes all that is compared"


def test_no_measured_number_is_written_into_the_text(notebook):
    measured = re.compile(r"\d\s*(?:ms|µs|ns|GB/s|TB/s|G?FLOP|%\s+(?:faster|slower)|times (?:as fast|faster|slower))\b")
    for source in cells(notebook, "markdown"):
        assert not measured.search(source), measured.search(source)


@pytest.mark.slow
def test_runs_from_top_to_bottom(lesson):
    ran = executed(lesson)
    assert ran.failure == ""
    outputs = [output for cell in ran.notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    for output in outputs:
        data = output.get("data", {})
        assert "image/png" not in data, "an image output has no alt text: use show()"
        for tag in re.findall(r"<img [^>]*>", data.get("text/html", "")):
            assert re.search(r'alt="[^"]{20,}"', tag), tag[-200:]
        if output.output_type == "stream" and output.name == "stderr":
            assert all(line.startswith("kda_lab:") for line in output.text.splitlines()), output.text
