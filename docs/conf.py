"""How Sphinx makes the book. `make book` calls it (see kda_lab/book.py); nothing is executed here, and nothing that the
pages need is fetched from a network: formulas become MathML, and what an interactive figure had drawn stands in for it.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

from kda_lab.show import DARK_FILTER

project = "kda_lab"
html_title = "kda_lab"
language = "en"
extensions = ["myst_nb"]
nitpicky = True

nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, Any] = {}
nb_merge_streams = True
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4
myst_update_mathjax = False

# JupyterLab's names for the colours of code, which the lessons' listings use.
CODE = ("comment", "error", "keyword", "number", "operator", "punctuation", "string", "variable")
LIGHT = ("#57606a", "#b3261e", "#7a3fc4", "#0550ae", "#8f3600", "#1f2328", "#0a6b2d", "#1f2328")
DARK = ("#9aa4af", "#ff8a80", "#d2a8ff", "#79c0ff", "#ffa657", "#e6e6e6", "#7ee787", "#e6e6e6")


def code_colours(colours: tuple[str, ...]) -> dict[str, str]:
    return {f"jp-mirror-editor-{name}-color": colour for name, colour in zip(CODE, colours, strict=True)}


html_theme = "furo"
html_theme_options = {
    "light_css_variables": code_colours(LIGHT),
    "dark_css_variables": code_colours(DARK) | {"kda-figure-filter": DARK_FILTER},
}
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"})]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_use_index = False
html_show_search_summary = False  # it is fetched, which browsers forbid between files
html_math_renderer = "mathml"


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def mathml(latex: str, display: str) -> str:
    """A formula as MathML, with what latex2mathml does not know put in words it does."""
    latex = latex.replace("{aligned}", "{align*}")
    latex = re.sub(r"\\text\w*\{[^{}]*\}", lambda text: text[0].replace(r"\_", "_"), latex)
    return convert(latex.strip(), display=display)
