"""`make tour`: runs every lesson as its notebook stands and makes the book of what came out.

Lessons run one after another, because they measure time. What ran is kept in build/lessons, so that `make book` need
not run again what has not changed; every page says when and where its lesson ran.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat

from kda_lab import bench, book, native
from kda_lab.native import cache
from kda_lab.profiling import recorded

CELL_TIMEOUT_S = 600
_KEPT = "kda_lab"  # the entry of a kept notebook's metadata


@dataclasses.dataclass(frozen=True)
class Lesson:
    """One notebook, executed or not."""

    path: Path
    notebook: nbformat.NotebookNode  # with its outputs, up to the cell that failed
    seconds: float = 0.0
    place: str = ""  # where and when it ran; "" when it did not
    failure: str = ""  # "" when every cell ran

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def state(self) -> str:
        """Whether, when and where it ran, as a sentence."""
        if not self.place:
            return "Has not run on this machine."
        return f"{'Failed after' if self.failure else 'Ran in'} {self.seconds:.0f} s on {self.place}."

    @property
    def title(self) -> str:
        """The first heading, in Markdown."""
        return _first_match(r"^#\s+(.+)$", self.notebook) or self.name

    @property
    def summary(self) -> str:
        """The first paragraph, in Markdown."""
        return _first_match(r"\A#.+\n+(.+(?:\n.+)*)", self.notebook)


def notebooks_dir() -> Path:
    """The lessons' folder. Raises FileNotFoundError where kda_lab was installed without a checkout."""
    folder = Path(__file__).resolve().parents[1] / "notebooks"
    if not folder.is_dir():
        raise FileNotFoundError(f"the lessons are not installed with the package (no {folder}); clone the repository")
    return folder


def find_lessons(wanted: Sequence[str] = ()) -> list[Path]:
    """The notebooks in order; only those whose number ("3", "03") or name is wanted, if any are."""
    found = sorted(notebooks_dir().glob("[0-9][0-9]_*.ipynb"))
    if not wanted:
        return found
    chosen = []
    for name in wanted:
        number = f"{name:0>2}_"
        matches = [path for path in found if path.stem == name.removesuffix(".ipynb") or path.name.startswith(number)]
        if not matches:
            raise ValueError(f"there is no lesson {name!r}; there are {', '.join(path.stem for path in found)}")
        chosen += matches
    return chosen


def run(output: Path, wanted: Sequence[str] = (), afresh: bool = True) -> int:
    """Runs lessons, measures the ladder, makes the book in `output`; returns 0, or 1 when a lesson or a check failed.

    Run are the wanted lessons (default: all), unless `afresh` is False and nothing changed since they last ran. All are
    in the book: those that are not run as they last ran, if nothing changed since, else without results.
    """
    chosen = find_lessons(wanted)
    for folder in (output, _kept_file(chosen[0]).parent):
        _check_writable(folder)
    os.environ["KINETO_LOG_LEVEL"] = "6"  # or torch.profiler would write of its start and stop among these lines
    beside = recorded.ladder_of_a_gpu() if bench.default_device() == "cpu" else ""  # damaged, it is named now
    started = time.perf_counter()
    native.build("cpu")
    lessons = []
    for path in find_lessons():
        lesson = None if afresh and path in chosen else kept(path)
        if path in chosen:
            print(f"{path.stem:<28}", end="", flush=True)
            how = "as it ran before" if lesson else "ok"
            lesson = lesson or execute_and_keep(path)
            print(f"{lesson.seconds:6.1f} s  {'FAILED' if lesson.failure else how}", flush=True)
        lessons.append(lesson or Lesson(path, nbformat.read(path, as_version=4)))
    rows = bench.ladder()
    index, warnings = book.write(lessons, rows, notebooks_dir().parent / "docs", output)

    print(f"\n{bench.format_table(rows)}\n")
    if beside:
        print(f"{beside}\n")
    print(f"{index.resolve()}  ({time.perf_counter() - started:.0f} s)")
    for lesson in lessons:
        if lesson.failure:
            print(f"\n{lesson.path.name}, {lesson.failure}", file=sys.stderr)
    if warnings:
        print(f"\nThe book is not as it should be:\n{warnings}", file=sys.stderr)
    return 1 if warnings or any(lesson.failure for lesson in lessons) or any(row.refused for row in rows) else 0


def _check_writable(folder: Path) -> None:
    """Raises ValueError now for what would end a run of minutes in an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written ({error}); make it writable, or name another folder for the book with --output"
        ) from None


def execute(path: Path) -> Lesson:
    """Runs a notebook from top to bottom in a kernel of its own, in the notebook's folder; the file stays as it is."""
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        kernel_manager_class=AsyncKernelManager,
        extra_arguments=["--IPKernelApp.log_level=40"],  # errors only: it warns of TCP, which never leaves this machine
        resources={"metadata": {"path": str(path.parent)}},
    )
    started = time.perf_counter()
    failure = ""
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        failure = _describe_failure(notebook, error)
    except AssertionError:  # at SIGINT and SIGTERM nbclient ends the kernel, then trips over there being none
        raise KeyboardInterrupt from None
    return Lesson(path, notebook, time.perf_counter() - started, bench.label(bench.default_device()), failure)


def execute_and_keep(path: Path) -> Lesson:
    """Runs a notebook, and keeps what came out, unless it failed, for `kept`.

    One process at a time: lessons write files beside their notebooks.
    """
    key = _key(path)
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    with cache.locked(cache.cache_dir() / "lessons" / f"{place}.lock", _kept_file(path).name):
        lesson = execute(path)
    if not lesson.failure:
        notebook = copy.deepcopy(lesson.notebook)
        notebook.metadata[_KEPT] = {"key": key, "seconds": lesson.seconds, "place": lesson.place}
        _kept_file(path).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, _kept_file(path))
    return lesson


def kept(path: Path) -> Lesson | None:
    """A lesson as it last ran; None when it has not, or when its results may have become others since."""
    if not _kept_file(path).is_file():
        return None
    notebook = nbformat.read(_kept_file(path), as_version=4)
    how = notebook.metadata.pop(_KEPT)
    return Lesson(path, notebook, how["seconds"], how["place"]) if how["key"] == _key(path) else None


def _kept_file(path: Path) -> Path:
    return path.parents[1] / "build" / "lessons" / path.name


def _key(path: Path) -> str:
    """A digest of what a lesson's results depend on: notebook, files that it names, package, kernels, machine."""
    text = path.read_text(encoding="utf-8")
    named = {path.parent / name for name in re.findall(r"\w+\.(?:cpp|cu)\b", text)}
    files = [path, *sorted(file for file in named if file.is_file())]
    for folder in (Path(__file__).parent, native.csrc_dir()):
        files += sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    settings = {name: value for name, value in os.environ.items() if name.startswith(("KDA_LAB_", "OMP_"))}
    facts = {name: value for name, value in bench.machine().items() if name not in {"date", "commit", "threads"}}
    digest = hashlib.sha256(repr((sorted(settings.items()), facts)).encode())
    for file in files:
        digest.update(f"{file}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _describe_failure(notebook: nbformat.NotebookNode, error: Exception) -> str:
    """Which cell, its source, and the error without the traceback (the page has that)."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    for cell in code:
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if errors:
            reason = f"{errors[0].ename}: {errors[0].evalue}"
            break
    else:  # the kernel died or the time ran out: in the first cell without a number, or the last with one
        cell = next((cell for cell in code if not cell.get("execution_count")), code[-1])
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    number = notebook.cells.index(cell) + 1
    source = "\n".join(f"    {line}" for line in cell.source.splitlines())
    return f"cell {number} of {len(notebook.cells)} failed:\n{source}\n{reason}"


def _first_match(pattern: str, notebook: nbformat.NotebookNode) -> str:
    text = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""
