"""What the lessons put under a cell: figures with alt text, tables, and code shown from the source files.

Everything here is HTML that follows JupyterLab's theme (light or dark) through its CSS variables, and has a plain-text
form for a terminal or a screen reader. Nothing is pasted: `source` and `diff` read the files that are compiled.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import html
import inspect
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_lab import registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_MEASURED = "not measured"
# Inline, because JupyterLab's own rules for tables and <pre> outweigh a stylesheet in an output.
_CAPTION = 'style="text-align:left; white-space:nowrap"'
_UNWRAPPED = 'style="white-space:pre; overflow-x:auto"'
_POINTER = 'style="cursor:pointer"'

# Colours come from JupyterLab's theme, with a fallback after the comma for other pages. No meaning rests on them:
# changed lines carry + and -, marked lines an arrow. JupyterLab strips <style> from a notebook it does not trust yet;
# code still looks like code then, because it is in a <pre>.
_STYLE = """
pre.kda-code { line-height: 1.4; margin: 0; }
pre.kda-code .kda-line { color: var(--jp-content-font-color2, #5c5c5c); user-select: none; }
pre.kda-code .kda-marked { background: rgba(230, 159, 0, 0.25); }
pre.kda-code .kda-added { background: rgba(0, 158, 115, 0.22); }
pre.kda-code .kda-removed { background: rgba(213, 94, 0, 0.22); }
"""

# Figures are drawn on white. In a dark theme lightness is turned over and hues stay; white becomes nearly the page's
# black. One picture serves both, and a notebook whose <style> was stripped shows it on white.
DARK_FILTER = "invert(0.93) hue-rotate(180deg)"
_FIGURE_STYLE = (
    f'<style>@media not print {{ [data-jp-theme-light="false"] img.kda-figure {{ filter: {DARK_FILTER}; }} }}</style>'
)


class Html:
    """HTML for a notebook, plain text elsewhere."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup = markup
        self.text = text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def png(figure: Figure, dpi: float | None = None) -> bytes:
    """The figure as PNG bytes (at the figure's own dpi when None)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi or figure.dpi, facecolor=figure.get_facecolor())
    return buffer.getvalue()


def image(data: bytes, alt: str, width: int | None = None) -> str:
    """An <img> with the PNG inside and `alt` beside it; `width` in CSS pixels (default: the image's own)."""
    size = f"width:{width}px;" if width else ""
    source = f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
    markup = f'<img class="kda-figure" src="{source}" alt="{html.escape(alt)}" style="{size}max-width:100%;">'
    return _FIGURE_STYLE + markup


def show(figure: Figure, alt: str | None = None) -> None:
    """Display a figure under the cell with an alt text: the finding, in a sentence. Below, it unfolds for everybody.

    `alt` defaults to `figure.alt`, which every figure of kda_lab.plots carries. As HTML rather than as an image output,
    because JupyterLab drops the alt text of the latter. Raises ValueError when there is no alt text.
    """
    alt = alt or getattr(figure, "alt", "")
    if not alt:
        raise ValueError(
            "show: the figure has no alt text; pass alt='…', one sentence that states what the figure finds"
        )
    from IPython.display import display

    # Drawn at twice the size it is shown at, so that it stays sharp on a high-density screen.
    width = round(figure.get_figwidth() * figure.dpi)
    words = f"<details><summary {_POINTER}>In words</summary><p>{html.escape(alt)}</p></details>"
    display(Html(image(png(figure, 2 * figure.dpi), alt, width) + words, alt))


def number(value: Any) -> str:
    """A table cell: four significant digits, or all those before the point; None is "not measured", NaN spelled out."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, tuple):
        return ", ".join(map(number, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if 1e3 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4g}"
    return f"{value:.1e}"


def table(rows: Iterable[Any], columns: Mapping[str, str] | None = None, caption: str = "") -> Html:
    """Rows (mappings or dataclasses) as a table with header cells and a caption.

    `columns` maps a field or property to its heading, in order; by default every field, named as it is.
    """
    rows = list(rows)
    if not rows:
        return Html(f"<p>{html.escape(caption)}: {NOT_MEASURED}</p>", f"{caption}: {NOT_MEASURED}")
    columns = columns or {name: name for name in _field_names(rows[0])}
    cells = [[row[name] if isinstance(row, Mapping) else getattr(row, name) for name in columns] for row in rows]
    numeric = [any(isinstance(row[i], (int, float)) for row in cells) for i in range(len(columns))]
    kinds = [f' style="text-align:{"right" if flag else "left"}"' for flag in numeric]
    head = "".join(f'<th scope="col"{kind}>{html.escape(name)}</th>' for name, kind in zip(columns.values(), kinds))
    body = ""
    for row in cells:
        first, *rest = (html.escape(number(value)) for value in row)
        body += f'<tr><th scope="row"{kinds[0]}>{first}</th>'
        body += "".join(f"<td{kind}>{value}</td>" for value, kind in zip(rest, kinds[1:])) + "</tr>"
    title = f"<caption {_CAPTION}>{html.escape(caption)}</caption>" if caption else ""
    markup = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return Html(markup, _text_table(caption, list(columns.values()), [[number(v) for v in row] for row in cells]))


def source(step: int | str, stage: str, device: str = "cpu", mark: str | None = None) -> Html:
    """One function of a step, read from the file that is compiled, with its line numbers.

    `stage` is the name of a function of the step, such as "activate_gate" or "forward"; lines that contain `mark` are
    marked. Raises ValueError when the step has no such function or no source for `device`.
    """
    path, first, lines = find_function(source_files(step, device=device)[0], stage)
    return _listing(lines, first, f"{_short(path)}, line {first}", "c++", mark)


def python_source(function: Callable, mark: str | None = None) -> Html:
    """A Python function of kda_lab, as `source` shows a stage."""
    lines, first = inspect.getsourcelines(function)
    path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")  # getsourcelines looks under decorators, too
    return _listing([line.rstrip("\n") for line in lines], first, f"{path.name}, line {first}", "python", mark)


def diff(
    before: int | str, after: int | str, stage: str | None = None, device: str | None = None, context: int = 2
) -> Html:
    """What changes from one step's source to another's; of one function only, when `stage` is given.

    The comment at the top of a file, its manual, is left out; so are unchanged lines, but for `context` of them around
    every change. Lines that differ in white space only count as unchanged. `device` is "cpu" by default, or "cuda"
    where one of the steps is on no CPU.
    """
    sources = source_files(before, after, device=device)
    if stage is None:
        names = [paths[0].name for paths in sources]
        (at_a, a), (at_b, b) = (zip(*lines_of(paths, manual=False)) for paths in sources)
    else:
        found = [find_function(paths, stage) for paths in sources]
        names = [_short(path) for path, _, _ in found]
        (at_a, a), (at_b, b) = ((range(first, first + len(lines)), lines) for _, first, lines in found)
    rows: list[tuple[str, int | None, int | None, str]] = []
    end = 0
    words = ([" ".join(line.split()) for line in lines] for lines in (a, b))
    for group in difflib.SequenceMatcher(None, *words, autojunk=False).get_grouped_opcodes(context):
        if skipped := group[0][1] - end:
            rows.append(("skipped", None, None, f"… {_lines(skipped)} unchanged"))
        for tag, a0, a1, b0, b1 in group:
            if tag == "equal":
                rows += [("equal", at_a[i], at_b[b0 + i - a0], a[i]) for i in range(a0, a1)]
            else:
                rows += [("removed", at_a[i], None, a[i]) for i in range(a0, a1)]
                rows += [("added", None, at_b[i], b[i]) for i in range(b0, b1)]
        end = group[-1][2]
    if rows and (skipped := len(a) - end):
        rows.append(("skipped", None, None, f"… {_lines(skipped)} unchanged"))
    counts = {kind: sum(row[0] == kind for row in rows) for kind in ("removed", "added")}
    where = f" in {stage}" if stage else ""
    caption = f"{' → '.join(names)}{where}: {_lines(counts['removed'])} removed, {counts['added']} added"
    signs = {"removed": "-", "added": "+", "equal": " "}
    colour = _highlighter("c++")
    markup, text = [], []
    for kind, line_a, line_b, code in rows:
        if kind == "skipped":
            markup.append(f'<span class="kda-line">{html.escape(code)}</span>')
            text.append(code)
        else:
            numbers = f'<span class="kda-line">{line_a or "":>4}{line_b or "":>5}</span>'
            markup.append(f'{numbers} <span class="kda-{kind}">{signs[kind]} {colour(code)}</span>')
            text.append(f"{signs[kind]} {code}")
    return _code_block(caption, markup, text)


def text_diff(before: int | str, after: int | str, device: str | None = None) -> Iterator[str]:
    """What changes from one step's source to another's, manuals and all, as a unified diff. Device: as in `diff`."""
    sources = source_files(before, after, device=device)
    (at_a, a), (at_b, b) = (zip(*lines_of(paths)) for paths in sources)

    def place(match: re.Match[str]) -> str:  # of a hunk, in the file that it begins in
        first_a, first_b = (max(int(match[group]), 1) - 1 for group in (1, 3))
        return f"@@ -{at_a[first_a]}{match[2]} +{at_b[first_b]}{match[4]}"

    for line in difflib.unified_diff(a, b, *(paths[0].name for paths in sources), lineterm=""):
        yield re.sub(r"^@@ -(\d+)(.*) \+(\d+)(.*)", place, line)


def source_files(*steps: int | str, device: str | None = None) -> list[tuple[Path, ...]]:
    """The files of each step for `device`; by default for a CPU, or for CUDA where one of the steps is on no CPU.

    Raises ValueError where a step is not on that device.
    """
    if device is None:
        device = "cpu" if all(map(_is_on_cpu, steps)) else "cuda"
    return [registry.get(step, device).sources[device] for step in steps]


def _is_on_cpu(step: int | str) -> bool:
    try:
        registry.get(step, "cpu")
    except ValueError:
        return False
    return True


def lines_of(paths: Sequence[Path], manual: bool = True) -> list[tuple[int, str]]:
    """A step's lines and their numbers in their files: its manual, then its parts, then the file that uses them.

    Where a step has parts, a line with the file's name, numbered 0, stands before each. manual: False leaves out the
    comments at the top of files.
    """
    lines = []
    for path in (*paths[1:], paths[0]):
        numbered = list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
        first = next((i for i, (_, line) in enumerate(numbered) if not line.startswith("//")), 0)
        name = [(0, f"// ---- {_short(path)}")] if len(paths) > 1 else []
        if path is paths[0] and manual:
            lines = [*numbered[:first], *lines, *name, *numbered[first:]]
        else:
            lines += [*name, *numbered[0 if manual else first :]]
    return lines


def _short(path: Path) -> str:
    """A file's name, after that of its folder if it is a part of a step."""
    return path.name if path.parent.name == "steps" else f"{path.parent.name}/{path.name}"


def find_function(paths: Sequence[Path], name: str) -> tuple[Path, int, list[str]]:
    """(file, first line's number, lines) of a C++ function's definition, with the comment and template line above it.

    Raises ValueError naming the functions that the files do define.
    """
    defined: list[str] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        code = _blank_comments(text)
        for match in re.finditer(r"\b(\w+)\s*\(", code):
            span = _definition(code, match.end() - 1)
            if span is None or match[1] in ("if", "constexpr", "for", "while", "switch", "catch"):
                continue
            if match[1] != name:
                defined.append(match[1])
                continue
            first = code.count("\n", 0, match.start())
            last = code.count("\n", 0, span)
            while first > 0 and not re.fullmatch(r"\s*|#.*|.*[;}]\s*|namespace.*", lines[first - 1]):
                first -= 1
            return path, first + 1, lines[first : last + 1]
    raise ValueError(f"{paths[0].name} defines no function {name!r}; it defines {', '.join(dict.fromkeys(defined))}")


def _definition(code: str, paren: int) -> int | None:
    """Where the body ends of the function whose parameter list opens at `paren`; None for a call or a declaration."""
    close = _matching(code, paren, "(", ")")
    head = re.match(r"\s*(?:const|noexcept)?\s*\{", code[close + 1 :]) if close is not None else None
    return _matching(code, close + head.end(), "{", "}") if head else None


def _matching(code: str, start: int, opening: str, closing: str) -> int | None:
    depth = 0
    for i in range(start, len(code)):
        depth += (code[i] == opening) - (code[i] == closing)
        if depth == 0:
            return i
    return None


def _blank_comments(text: str) -> str:
    """The text with comments and string literals blanked, so that braces in them do not count; offsets stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count} lines"


def _field_names(row: Any) -> list[str]:
    return list(row) if isinstance(row, Mapping) else [field.name for field in dataclasses.fields(row)]


def _listing(lines: Sequence[str], first: int, caption: str, language: str, mark: str | None) -> Html:
    if mark and not any(mark in line for line in lines):
        raise ValueError(f"mark: no line of {caption} contains {mark!r}")
    colour = _highlighter(language)
    markup = []
    for i, line in enumerate(lines, first):
        code = f'<span class="kda-marked">{colour(line)}</span>' if mark and mark in line else colour(line)
        markup.append(f'<span class="kda-line">{i:>4} {"▸" if mark and mark in line else " "}</span> {code}')
    return _code_block(caption, markup, lines)


def _highlighter(language: str) -> Callable[[str], str]:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    lexer, formatter = get_lexer_by_name(language, stripnl=False), HtmlFormatter(nowrap=True)
    return lambda line: highlight(line, lexer, formatter).rstrip("\n")


def _code_block(caption: str, markup: Sequence[str], text: Sequence[str]) -> Html:
    from jupyterlab_pygments import JupyterStyle
    from pygments.formatters import HtmlFormatter

    style = _STYLE + "\n".join(HtmlFormatter(style=JupyterStyle).get_token_style_defs("pre.kda-code"))
    code = "\n".join(markup)
    return Html(
        f'<style>{style}</style><p><em>{html.escape(caption)}</em></p><pre class="kda-code" {_UNWRAPPED}>{code}</pre>',
        "\n".join([caption, *text]),
    )


def _text_table(caption: str, head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (head, *rows)]
    return "\n".join([caption, *lines] if caption else lines)
