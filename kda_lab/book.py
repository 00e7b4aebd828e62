"""`make book`: the executed lessons, the glossary and the lecturers' guide as HTML pages that need no network.

Here are the sources that Sphinx reads, in one folder; how it turns them into pages is in docs/conf.py.
"""

from __future__ import annotations

import copy
import io
import posixpath
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from kda_lab import bench

if TYPE_CHECKING:
    from kda_lab.tour import Lesson

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_WIDGET_STATE = "application/vnd.jupyter.widget-state+json"

_INDEX = """\
# How a GPU kernel gets fast

Kimi Delta Attention forward, one readable step at a time. These pages are the lessons as they ran on this machine;
`make lab` opens them live. Words: [glossary](docs/glossary.md). For a class: [guide for lecturers](docs/lecturers.md).

## The lessons

{lessons}

## The ladder, measured here

{ladder}

```{{toctree}}
:hidden:
:glob:
notebooks/*
docs/*
```
"""


def write(lessons: Sequence[Lesson], rows: Sequence[bench.Row], docs: Path, output: Path) -> tuple[Path, str]:
    """Builds the book of lessons, ladder and the pages in `docs` into the folder `output`.

    Returns its index.html, and what Sphinx warns of: "" for a book that is right. Raises ValueError when `output` holds
    something that is no book.
    """
    if output.is_dir() and any(output.iterdir()):
        if not (output / ".buildinfo").is_file():
            raise ValueError(f"output is {output}, which holds other files; expected a new folder, or one with a book")
        shutil.rmtree(output)
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        (sources / "notebooks").mkdir()
        for lesson in lessons:
            nbformat.write(_page(lesson), sources / "notebooks" / f"{lesson.name}.ipynb")
        (sources / "docs").mkdir()
        for page in docs.glob("*.md"):
            shutil.copy(page, sources / "docs")
        (sources / "index.md").write_text(_index(lessons, rows), encoding="utf-8")
        warnings = _build(sources, docs, output)
    return output / "index.html", warnings


def _build(sources: Path, config: Path, output: Path) -> str:
    """Runs Sphinx and returns its warnings."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    warnings = io.StringIO()
    with docutils_namespace(), tempfile.TemporaryDirectory() as doctrees:
        Sphinx(sources, config, output, doctrees, "html", status=None, warning=warnings).build()
    return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue())  # without the colours of a terminal


def _index(lessons: Sequence[Lesson], rows: Sequence[bench.Row]) -> str:
    items = []
    for lesson in lessons:
        # Links of a lesson start from its folder, those of the index from one above.
        summary = re.sub(
            r"(?<=\]\()(?!https:)[^)]+", lambda link: posixpath.normpath(f"notebooks/{link[0]}"), lesson.summary
        )
        items.append(f"**[{lesson.title}](notebooks/{lesson.name}.ipynb)**\\\n{summary}\\\n*{lesson.state}*")
    return _INDEX.format(lessons="\n\n".join(items), ladder=_ladder(rows))


def _ladder(rows: Sequence[bench.Row]) -> str:
    """The ladder as a table in Markdown, with where it was measured above and what it means below."""
    if not rows:
        return "not measured"
    head, *lines = (f"| {' | '.join(cells)} |" for cells in bench.table_cells(rows))
    table = "\n".join([head, f"|--:|---|{'--:|' * 5}", *lines])
    refused = (row.refused for row in rows if row.refused)
    return "\n\n".join([bench.label(rows[0].device), table, bench.legend(rows), *refused])


def _page(lesson: Lesson) -> nbformat.NotebookNode:
    """The notebook with a line on when it ran, and with widgets as they stood at the end."""
    notebook = copy.deepcopy(lesson.notebook)
    widgets = notebook.metadata.pop("widgets", {}).get(_WIDGET_STATE, {}).get("state", {})
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            view = output.get("data", {}).pop(_WIDGET_VIEW, None)
            if view:
                output.data["text/html"] = _static_twin(view["model_id"], widgets)
    note = f"*{lesson.state}*"
    if lesson.failure:
        note = f"````{{error}}\n```text\n{lesson.failure}\n```\n````"
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(note))
    return notebook


def _static_twin(model_id: str, models: dict) -> str:
    """What a widget shows without a kernel: the text and pictures of its HTML parts."""

    def parts(model_id: str) -> list[str]:
        model = models.get(model_id, {})
        state = model.get("state", {})
        here = [state["value"]] if model.get("model_name") == "HTMLModel" and state.get("value") else []
        return here + [part for child in state.get("children", ()) for part in parts(child.removeprefix("IPY_MODEL_"))]

    note = "Its controls work in JupyterLab (<code>make lab</code>); this is how it stood when the lesson had run."
    return f'<div class="widget">{"".join(parts(model_id))}<p><small>{note}</small></p></div>'
