"""The tour: every lesson runs as it stands, one that fails is named and stops no other, and nothing stale is kept."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import nbformat
import pytest

from kda_lab import bench, tour
from kda_lab.profiling import recorded

DOCS = Path(__file__).parents[1] / "docs"
GOOD = ["# 0 · Good\n\nYou will see it.", "print('said')"]
BAD = ["# 1 · Bad", "print('before')", "x = 1\nx / 0", "print('never')"]


def write(folder: Path, name: str, sources: list[str]) -> Path:
    first, *rest = sources
    cells = [nbformat.v4.new_markdown_cell(first), *map(nbformat.v4.new_code_cell, rest)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder for lessons, in place of the real one; no ladder is measured."""
    folder = tmp_path / "é lessons" / "notebooks"
    folder.mkdir(parents=True)
    shutil.copytree(DOCS, folder.parent / "docs")
    for page in (folder.parent / "docs").glob("*.md"):
        page.write_text(f"# {page.stem}")
    monkeypatch.setattr(tour, "notebooks_dir", lambda: folder)
    monkeypatch.setattr(bench, "ladder", lambda: [])
    return folder


def page(folder: Path, name: str) -> str:
    return (folder / "notebooks" / f"{name}.html").read_text(encoding="utf-8")


def test_a_lesson_that_fails_is_named_and_stops_no_other(folder, tmp_path, capsys):
    write(folder, "00_bad", BAD)
    write(folder, "01_good", GOOD)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert tour.run(tmp_path / "book") == 1
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "running a lesson changed its file"
    out, err = capsys.readouterr()
    assert re.search(r"00_bad +\d+\.\d s  FAILED\n01_good +\d+\.\d s  ok", out)
    assert str(tmp_path / "book" / "index.html") in out
    assert ("\nNo GPU here: recorded on " in out) == (bench.default_device() == "cpu" and recorded.available() != [])
    failure = "cell 3 of 4 failed:\n    x = 1\n    x / 0\nZeroDivisionError: division by zero"
    assert f"00_bad.ipynb, {failure}" in err
    html = page(tmp_path / "book", "00_bad")
    assert "cell 3 of 4 failed" in html
    assert "before\n" in html
    assert "never\n" not in html
    assert "said\n" in page(tmp_path / "book", "01_good")


def test_a_tour_of_one_lesson_has_the_others_without_results(folder, tmp_path):
    write(folder, "00_good", [GOOD[0] + " And [the next](01_good.ipynb).", "print('ran')"])
    write(folder, "01_good", GOOD)
    assert tour.run(tmp_path / "book", ["0"]) == 0
    assert "Ran in" in page(tmp_path / "book", "00_good")
    html = page(tmp_path / "book", "01_good")
    assert "Has not run on this machine." in html
    assert "<pre>said" not in html.replace("<span></span>", "")


def test_a_lesson_that_writes_files_runs_in_one_process_at_a_time(folder):
    code = "import pathlib, time\nfile = pathlib.Path('mine')\nfile.touch(exist_ok=False)\ntime.sleep(2)\nfile.unlink()"
    path = write(folder, "00_writes", ["# Writes a file", code])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert [lesson.failure for lesson in pool.map(tour.execute_and_keep, [path, path])] == ["", ""]


def test_a_book_made_again_runs_only_what_changed(folder, tmp_path, capsys):
    write(folder, "00_good", GOOD)
    changed = write(folder, "01_good", GOOD)
    assert tour.run(tmp_path / "book") == 0
    first = page(tmp_path / "book", "00_good")
    write(folder, changed.stem, [GOOD[0], "print('something else')"])
    capsys.readouterr()
    assert tour.run(tmp_path / "book", afresh=False) == 0
    assert re.search(r"00_good.*as it ran before\n01_good.*ok\n", capsys.readouterr().out)
    assert page(tmp_path / "book", "00_good") == first, "with the date and machine of the run that it shows"
    assert "something else\n" in page(tmp_path / "book", "01_good")
    assert tour.run(tmp_path / "book", ["0"]) == 0
    assert "ok" in capsys.readouterr().out, "a tour runs its lessons afresh"


def test_nothing_is_kept_that_could_have_become_different(folder, tmp_path, monkeypatch):
    lesson = write(folder, "00_good", [GOOD[0], "from pathlib import Path\nprint(Path('some_step.cpp').exists())"])
    package, csrc = tmp_path / "package", tmp_path / "csrc"
    for source in (package / "tour.py", csrc / "cpu" / "kernel.cpp"):
        source.parent.mkdir(parents=True)
        source.touch()
    monkeypatch.setattr(tour, "__file__", str(package / "tour.py"))
    monkeypatch.setattr(tour.native, "csrc_dir", lambda: csrc)
    ran = tour.execute_and_keep(lesson)
    kept = tour.kept(lesson)
    assert (kept.notebook.cells, kept.seconds, kept.place) == (ran.notebook.cells, ran.seconds, ran.place)
    for change in (
        lambda: (package / "tour.py").write_text("1"),
        lambda: (package / "data.json").write_text("1"),
        lambda: (csrc / "cpu" / "kernel.cpp").write_text("1"),
        lambda: (folder / "some_step.cpp").write_text("1"),
        lambda: monkeypatch.setenv("KDA_LAB_RECORDED", "elsewhere"),
        lambda: monkeypatch.setattr(bench, "machine", lambda: {"cpu": "another"}),
        lambda: write(folder, lesson.stem, GOOD),
    ):
        change()
        assert tour.kept(lesson) is None
        monkeypatch.setattr(tour, "execute", lambda path: ran)
        tour.execute_and_keep(lesson)
        assert tour.kept(lesson) is not None


def test_a_lesson_that_failed_is_not_kept(folder):
    lesson = write(folder, "00_bad", BAD)
    assert tour.execute_and_keep(lesson).failure
    assert tour.kept(lesson) is None


def test_a_dead_kernel_is_a_failure_of_its_cell(folder):
    lesson = tour.execute(write(folder, "00_dies", ["# 0", "x = 1", "import os\nos._exit(3)"]))
    assert lesson.failure.startswith("cell 3 of 3 failed:\n    import os")
    assert "DeadKernelError" in lesson.failure


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lesson_that_is_interrupted_ends_with_its_kernel(number, folder):
    ready = folder / "pid"
    tell = f"print(os.getpid(), file=open({str(ready)!r}, 'w'), flush=True)"
    path = write(folder, "00_slow", ["# 0", f"import os, time\n{tell}\ntime.sleep(60)"])

    def interrupt() -> None:
        while not (ready.exists() and ready.read_text().endswith("\n")):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        tour.execute(path)
    assert not Path(f"/proc/{ready.read_text().strip()}").exists()


@pytest.mark.parametrize("wanted", ["3", "03", "03_factored", "03_factored.ipynb"])
def test_a_lesson_has_its_number_and_name_as_address(wanted):
    assert [path.stem for path in tour.find_lessons([wanted])] == ["03_factored"]


def test_the_book_replaces_an_older_one_and_nothing_else(folder, tmp_path):
    write(folder, "00_good", GOOD)
    assert tour.run(tmp_path / "book") == 0
    (tmp_path / "book" / "notebooks" / "99_gone.html").write_text("old")
    assert tour.run(tmp_path / "book", afresh=False) == 0
    assert not (tmp_path / "book" / "notebooks" / "99_gone.html").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("dear")
    with pytest.raises(ValueError, match="holds other files"):
        tour.run(tmp_path / "mine", afresh=False)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_what_sphinx_warns_of_is_said_and_red(folder, tmp_path, capsys):
    write(folder, "00_good", ["# 0 · Good\n\nA [link](nowhere.md).", "1"])
    assert tour.run(tmp_path / "book") == 1
    assert "nowhere.md" in capsys.readouterr().err
