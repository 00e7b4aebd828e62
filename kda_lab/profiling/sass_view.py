"""Two listings of machine code side by side, with the instructions of the exponential marked."""

from __future__ import annotations

import difflib
import html
import re

from kda_lab.show import Html

EXPONENTIAL = r"\bMUFU\.EX2\b|\bFFMA\.SAT\b|\bMUFU\.(RCP|TANH)\b"
"""What an exponential, or the sigmoid around it, is made of: the unit itself and expf's range reduction."""

_STYLE = (
    "border-collapse:collapse;font-family:var(--jp-code-font-family,monospace);font-size:12px;"
    "color:var(--jp-content-font-color1,#1a1a1a);background:var(--jp-layout-color0,#ffffff)"
)
_CELL = "padding:0 1em 0 0;white-space:pre;border:0;text-align:left;vertical-align:top"
_SIGNS = {"equal": "  ", "delete": "- ", "insert": "+ ", "replace": "~ "}
_COLOURS = {"delete": "rgba(213,94,0,0.20)", "insert": "rgba(0,158,115,0.20)", "replace": "rgba(86,180,233,0.20)"}


def side_by_side(before: str, after: str, names: tuple[str, str], mark: str = EXPONENTIAL, context: int = 3) -> Html:
    """The instructions of two listings, aligned; what neither changed is left out but for `context` lines.

    Addresses, encodings and register numbers do not count as changes: an instruction is its opcode and modifiers. Lines
    that match `mark` carry an arrow.
    """
    a, b = _instructions(before), _instructions(after)
    opcodes = difflib.SequenceMatcher(None, [_opcode(i) for i in a], [_opcode(i) for i in b], autojunk=False)
    rows: list[tuple[str, str, str]] = []
    for group in opcodes.get_grouped_opcodes(context):
        rows.append(("gap", "", ""))
        for kind, a0, a1, b0, b1 in group:
            left, right = a[a0:a1], b[b0:b1]
            for i in range(max(len(left), len(right))):
                rows.append((kind, left[i] if i < len(left) else "", right[i] if i < len(right) else ""))
    counts = [sum(bool(re.search(mark, line)) for line in lines) for lines in (a, b)]
    caption = (
        f"{names[0]}: {len(a)} instructions, {counts[0]} of the exponential. "
        f"{names[1]}: {len(b)} instructions, {counts[1]} of the exponential."
    )
    body = "".join(_row(kind, left, right, mark) for kind, left, right in rows)
    head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(name)}</th>' for name in names)
    markup = (
        f'<div style="overflow-x:auto"><table style="{_STYLE}"><caption style="text-align:left">{html.escape(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    width = max((len(left) for _, left, _ in rows), default=0) + 4
    lines = [f"{_shown(kind, left, mark):<{width}} {_shown(kind, right, mark)}".rstrip() for kind, left, right in rows]
    return Html(markup, "\n".join([caption, *lines]))


def _instructions(listing: str) -> list[str]:
    """The instructions of a cuobjdump or nvdisasm listing, without address and encoding."""
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+([^;]+?)\s*;", listing, flags=re.MULTILINE)
    return [re.sub(r"\s+", " ", instruction) for instruction in found]


def _opcode(instruction: str) -> str:
    """Opcode and modifiers, without predicate and operands."""
    words = instruction.split()
    return next((word for word in words if not word.startswith("@")), "")


def _row(kind: str, left: str, right: str, mark: str) -> str:
    if kind == "gap":
        return f'<tr><td colspan="2" style="{_CELL}">…</td></tr>'
    colour = f"background:{_COLOURS[kind]}" if kind in _COLOURS else ""
    cells = (f'<td style="{_CELL}">{html.escape(_shown(kind, text, mark))}</td>' for text in (left, right))
    return f'<tr style="{colour}">{"".join(cells)}</tr>'


def _shown(kind: str, instruction: str, mark: str) -> str:
    if kind == "gap":
        return "…"
    arrow = "▸ " if instruction and re.search(mark, instruction) else "  "
    return f"{_SIGNS[kind]}{arrow}{instruction}" if instruction else ""
