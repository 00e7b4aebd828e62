"""`make tour`: runs every lesson as its notebook stands and writes what came out as HTML pages that need no network.

Lessons run one after another, because they measure time.
"""

from __future__ import annotations

import copy
import dataclasses
import html
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat

from kda_lab import bench, native

CELL_TIMEOUT_S = 600
_STYLE = Path(__file__).parent / "data" / "tour.css"
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


@dataclasses.dataclass(frozen=True)
class Lesson:
    """One executed notebook."""

    path: Path
    notebook: nbformat.NotebookNode  # with its outputs, up to the cell that failed
    seconds: float
    failure: str  # "" when every cell ran

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def title(self) -> str:
        """The first heading, without Markdown's marks."""
        return _first_match(r"^#\s+(.+)$", self.notebook).replace("`", "") or self.name

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


def run(output: Path, wanted: Sequence[str] = ()) -> int:
    """Builds, executes, writes the pages, prints the ladder; returns 0, or 1 when a lesson or a step's check failed."""
    paths = find_lessons(wanted)
    os.environ["KINETO_LOG_LEVEL"] = (
        "6"  # torch.profiler in a lesson would write of its start and stop among these lines
    )
    started = time.perf_counter()
    native.build("cpu")
    lessons = []
    for path in paths:
        print(f"{path.stem:<28}", end="", flush=True)
        lesson = execute(path)
        lessons.append(lesson)
        print(f"{lesson.seconds:6.1f} s  {'FAILED' if lesson.failure else 'ok'}", flush=True)
    rows = bench.ladder()
    table = bench.format_table(rows)
    index = write_pages(lessons, table, output)

    print(f"\n{table}\n\n{index.resolve()}  ({time.perf_counter() - started:.0f} s)")
    for lesson in lessons:
        if lesson.failure:
            print(f"\n{lesson.path.name}, {lesson.failure}", file=sys.stderr)
    return 1 if any(lesson.failure for lesson in lessons) or any(row.refused for row in rows) else 0


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
    return Lesson(path, notebook, time.perf_counter() - started, failure)


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


def write_pages(lessons: Sequence[Lesson], table: str, output: Path) -> Path:
    """Writes one page a lesson and index.html into `output`, replacing what was there; returns the index."""
    if output.is_dir():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    shutil.copy(_STYLE, output / "tour.css")
    (output / "code.css").write_text(_code_style(), encoding="utf-8")
    for before, lesson, after in zip([None, *lessons], lessons, [*lessons[1:], None]):
        links = ['<a href="index.html">All lessons</a>']
        links += [
            f'<a href="{other.name}.html">{arrow}</a>'
            for other, arrow in ((before, "← Before"), (after, "Next →"))
            if other
        ]
        nav = f"<nav>{' '.join(links)}</nav>"
        failed = f'<pre class="failure">{html.escape(lesson.failure)}</pre>' if lesson.failure else ""
        page = f"{nav}{failed}<main>{_body(lesson.notebook)}</main>{nav}"
        (output / f"{lesson.name}.html").write_text(_page(lesson.title, page), encoding="utf-8")
    for path in sorted((notebooks_dir().parent / "docs").glob("*.md")):
        body = (
            f'<nav><a href="index.html">All lessons</a></nav><main>{_markdown(path.read_text(encoding="utf-8"))}</main>'
        )
        (output / f"{path.stem}.html").write_text(_page(path.stem, body), encoding="utf-8")
    index = output / "index.html"
    index.write_text(_page("kda_lab", _index(lessons, table)), encoding="utf-8")
    return index


def _index(lessons: Sequence[Lesson], table: str) -> str:
    items = []
    for lesson in lessons:
        state = '<strong class="failure">failed</strong>' if lesson.failure else f"ran in {lesson.seconds:.0f} s"
        items.append(
            f'<li><a href="{lesson.name}.html">{html.escape(lesson.title)}</a> <small>{state}</small>'
            f"{_markdown(lesson.summary)}</li>"
        )
    machine = bench.machine(bench.default_device())
    label = ", ".join([machine.get("gpu") or machine["cpu"], f"torch {machine['torch']}", machine["date"]])
    return (
        "<main><h1>How a GPU kernel gets fast</h1><p>Kimi Delta Attention forward, one readable step at a time. These "
        "pages are the lessons as they just ran on this machine; <code>make lab</code> opens them live.</p>"
        f'<ol class="lessons">{"".join(items)}</ol><h2>The ladder, measured here</h2>'
        f'<p>{html.escape(label)}, commit {machine["commit"]}</p><pre class="ladder">{html.escape(table)}</pre></main>'
    )


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="stylesheet" href="tour.css"><link rel="stylesheet" href="code.css"></head>
<body>{body}</body></html>
"""


def _page(title: str, body: str) -> str:
    return _PAGE.format(title=html.escape(title), body=body)


def _body(notebook: nbformat.NotebookNode) -> str:
    """Code, outputs and Markdown as HTML, with formulas as MathML and widgets as they stood at the end."""
    from nbconvert import HTMLExporter, TemplateExporter
    from nbconvert.filters import Highlight2HTML

    notebook = copy.deepcopy(notebook)
    widgets = notebook.metadata.pop("widgets", {}).get(_WIDGET_STATE, {}).get("state", {})
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            view = output.get("data", {}).pop(_WIDGET_VIEW, None)
            if view:
                output.data["text/html"] = _static_twin(view["model_id"], widgets)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.register_filter("markdown2html", _markdown)
    exporter.register_filter("highlight_code", Highlight2HTML(pygments_lexer="ipython3"))
    # Not HTMLExporter's own method: it sends the page through a parser that collapses the indentation of listings.
    return TemplateExporter.from_notebook_node(exporter, notebook)[0]


def _static_twin(model_id: str, models: dict) -> str:
    """What a widget shows without a kernel: the text and pictures of its HTML parts."""

    def parts(model_id: str) -> list[str]:
        model = models.get(model_id, {})
        state = model.get("state", {})
        here = [state["value"]] if model.get("model_name") == "HTMLModel" and state.get("value") else []
        return here + [part for child in state.get("children", ()) for part in parts(child.removeprefix("IPY_MODEL_"))]

    note = "Its controls work in JupyterLab (<code>make lab</code>); this is how it stood when the page was made."
    return f'<div class="widget">{"".join(parts(model_id))}<p><small>{note}</small></p></div>'


def _markdown(source: str) -> str:
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        """Formulas as MathML, which browsers draw themselves, and links to other lessons and docs as pages."""

        def link(self, text: str, url: str, title: str | None = None) -> str:
            return super().link(text, re.sub(r"^(?:\d\d_\w+\.ipynb|\.\./docs/\w+\.md)", _page_of, url), title)

        def block_math(self, body: str) -> str:
            return _mathml(body, "block")

        def inline_math(self, body: str) -> str:
            return _mathml(body, "inline")

        def latex_environment(self, name: str, body: str) -> str:
            return _mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")

    return MarkdownWithMath(renderer=Renderer(escape=False, anchor_link_text="#")).render(source)


def _page_of(link: re.Match[str]) -> str:
    return Path(link[0]).with_suffix(".html").name


def _mathml(latex: str, display: str) -> str:
    """A formula as MathML, with what latex2mathml does not know put in words it does."""
    from latex2mathml.converter import convert

    latex = latex.replace("{aligned}", "{align*}")
    latex = re.sub(r"\\text\w*\{[^{}]*\}", lambda text: text[0].replace(r"\_", "_"), latex)
    return convert(latex.strip(), display=display)


def _code_style() -> str:
    from jupyterlab_pygments import JupyterStyle
    from pygments.formatters import HtmlFormatter

    return "\n".join(HtmlFormatter(style=JupyterStyle).get_token_style_defs(".highlight"))


def _first_match(pattern: str, notebook: nbformat.NotebookNode) -> str:
    text = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""
