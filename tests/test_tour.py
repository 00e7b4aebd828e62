"""The tour's pages: what a lesson shows is on its page, offline; a lesson that fails is named and stops no other."""

from __future__ import annotations

import re

import nbformat
import pytest

from kda_lab import bench, tour

GOOD = [
    "# 0 · A `title`\n\nYou will see $e^x$.\n\nSee [the next](01_bad.ipynb#part), a [word](../docs/words.md#it) and\n\n"
    "$$\n\\begin{aligned}\na &= \\texttt{lower\\_bound} && b \\\\\nc &\\leftarrow d\n\\end{aligned}\n$$",
    "print('said')",
    "from IPython.display import HTML\nHTML('<table><tr><td>    indented</td></tr></table>')",
    "import ipywidgets\nipywidgets.VBox([ipywidgets.IntSlider(3), ipywidgets.HTML('<b>drawn</b>')])",
]
BAD = ["# 1 · Bad", "print('before')", "x = 1\nx / 0", "print('never')"]


def write(folder, name: str, sources: list[str]) -> None:
    first, *rest = sources
    cells = [nbformat.v4.new_markdown_cell(first), *map(nbformat.v4.new_code_cell, rest)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / f"{name}.ipynb")


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """One good and one bad lesson as they ran, and the index of their pages."""
    folder = tmp_path_factory.mktemp("é lessons") / "notebooks"
    folder.mkdir()
    (folder.parent / "docs").mkdir()
    (folder.parent / "docs" / "words.md").write_text("# Words\n\nIt: $x$.")
    write(folder, "00_good", GOOD)
    write(folder, "01_bad", BAD)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tour, "notebooks_dir", lambda: folder)
        patch.setattr(bench, "ladder", lambda: [])
        lessons = [tour.execute(path) for path in tour.find_lessons()]
        index = tour.write_pages(lessons, "the table", tmp_path_factory.mktemp("é out") / "tour")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "running a lesson changed its file"
    return lessons, index


def page(toured, name: str) -> str:
    return (toured[1].parent / f"{name}.html").read_text(encoding="utf-8")


def test_outputs_are_on_the_page_as_they_were(toured):
    html = page(toured, "00_good")
    assert "<pre>said\n</pre>" in html.replace("<pre>\n", "<pre>")
    assert "<td>    indented</td>" in html


def test_a_widget_is_shown_by_what_it_had_drawn(toured):
    html = page(toured, "00_good")
    assert '<div class="widget"><b>drawn</b>' in html
    assert "make lab" in html


def test_formulas_are_mathml_with_nothing_left_over(toured):
    html = page(toured, "00_good")
    assert html.count("<math ") == 2
    assert "lower_bound</mtext>" in html
    assert "<mi>&</mi>" not in html
    assert "$" not in html
    assert html.count("<mtr>") == 2


def test_links_between_lessons_lead_to_pages(toured):
    assert 'href="01_bad.html#part"' in page(toured, "00_good")
    assert 'href="words.html#it"' in page(toured, "00_good")
    assert "<math" in page(toured, "words")


def test_pages_need_no_network_and_no_script(toured):
    for path in toured[1].parent.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<script|@import|(src|href)=\"(https?:)?//", text), path.name


def test_the_index_lists_every_lesson_with_its_state(toured):
    html = page(toured, "index")
    assert re.search(r'<a href="00_good.html">0 · A title</a> <small>ran in \d+ s', html)
    assert re.search(r'<a href="01_bad.html">1 · Bad</a> <small><strong class="failure">failed', html)
    assert "You will see <math" in html
    assert "the table" in html


def test_a_failure_names_cell_source_and_error_and_is_on_the_page(toured):
    good, bad = toured[0]
    assert good.failure == ""
    assert bad.failure == "cell 3 of 4 failed:\n    x = 1\n    x / 0\nZeroDivisionError: division by zero"
    html = page(toured, "01_bad")
    assert "ZeroDivisionError: division by zero" in html
    assert "<pre>before\n</pre>" in html.replace("<pre>\n", "<pre>")
    assert "<pre>never" not in html


def test_run_returns_1_and_says_why_when_a_lesson_fails(tmp_path, monkeypatch, capsys):
    write(tmp_path, "01_bad", BAD)
    monkeypatch.setattr(tour, "notebooks_dir", lambda: tmp_path)
    monkeypatch.setattr(bench, "ladder", lambda: [])
    assert tour.run(tmp_path / "out") == 1
    out, err = capsys.readouterr()
    assert re.search(r"01_bad +\d+\.\d s  FAILED", out)
    assert "01_bad.ipynb, cell 3 of 4 failed" in err
    assert (tmp_path / "out" / "index.html").exists()


def test_a_dead_kernel_is_a_failure_of_its_cell(tmp_path):
    write(tmp_path, "00_dies", ["# 0", "x = 1", "import os\nos._exit(3)"])
    lesson = tour.execute(tmp_path / "00_dies.ipynb")
    assert lesson.failure.startswith("cell 3 of 3 failed:\n    import os")
    assert "DeadKernelError" in lesson.failure


@pytest.mark.parametrize("wanted", ["3", "03", "03_factored", "03_factored.ipynb"])
def test_a_lesson_has_its_number_and_name_as_address(wanted):
    assert [path.stem for path in tour.find_lessons([wanted])] == ["03_factored"]


def test_an_old_page_does_not_survive(tmp_path, toured):
    output = tmp_path / "tour"
    output.mkdir()
    (output / "99_gone.html").write_text("old")
    tour.write_pages(toured[0], "", output)
    assert not (output / "99_gone.html").exists()
