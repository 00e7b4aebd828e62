"""Machine code to read: one kernel, or two side by side, with the instructions of the exponential marked."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Mapping

from kda_lab import sass
from kda_lab.profiling import recorded
from kda_lab.sass import Kernel
from kda_lab.show import Html

EXPONENTIAL = r"MUFU\.EX2|FFMA\.SAT|MUFU\.RCP|MUFU\.TANH"
"""What an exponential, and the sigmoid around it, is made of: the unit itself and expf's range reduction."""

_STYLE = (
    "border-collapse:collapse;font-family:var(--jp-code-font-family,monospace);font-size:12px;"
    "color:var(--jp-content-font-color1,#1a1a1a);background:var(--jp-layout-color0,#ffffff)"
)
_CELL = "padding:0 1em 0 0;white-space:pre;border:0;text-align:left;vertical-align:top"
_SIGNS = {"equal": "  ", "delete": "- ", "insert": "+ ", "replace": "~ "}
_COLOURS = {"delete": "rgba(213,94,0,0.20)", "insert": "rgba(0,158,115,0.20)", "replace": "rgba(86,180,233,0.20)"}


def of_steps(step: int | str, other: int | str | None = None, *, kernel: str = "", arch: str = "sm_90a") -> Html:
    """A step's kernel, or that of two steps side by side, compiled now, or as recorded where there is no compiler.

    kernel: its name, such as "gate" or "gate<32>"; "" is the step's first. Raises ValueError naming those there are.
    """
    sides = [(str(name), _code(name, arch)) for name in (step, other) if name is not None]
    found = [(f"{name}: {chosen.name}", chosen) for name, code in sides for chosen in [choose(code, kernel, name)]]
    if len(found) == 1:
        return side_by_side(found[0][1], found[0][1], (found[0][0], "the same"), context=10**6)
    (name_a, a), (name_b, b) = found
    return side_by_side(a, b, (name_a, name_b))


def _code(step: int | str, arch: str) -> Mapping[str, Kernel]:
    try:
        return sass.kernels(sass.compile_step(step, arch))
    except sass.CompilerNotFound:
        recording = recorded.load()
        code = recording.sass(step) if recording else None
        if code is None:
            raise
        return code


def choose(code: Mapping[str, Kernel], name: str, step: int | str) -> Kernel:
    """The kernel of this name, such as "gate<16>", or the smallest chunk's for "gate", or the first for "".

    Raises ValueError naming those there are.
    """

    def order(kernel: Kernel) -> tuple[str, list[int]]:  # the smallest chunk first
        return kernel.name.split("<")[0], [int(number) for number in re.findall(r"\d+", kernel.name.partition("<")[2])]

    ordered = sorted(code.values(), key=order)
    for candidate in ordered:
        if not name or name in (candidate.name, order(candidate)[0]):
            return candidate
    raise ValueError(f"step {step} has no kernel {name!r}; it has {', '.join(kernel.name for kernel in ordered)}")


def side_by_side(before: Kernel, after: Kernel, names: tuple[str, str], context: int = 3) -> Html:
    """The instructions of two kernels, aligned by opcode; what neither changed is left out but for `context` lines.

    Registers and addresses do not count as changes. Instructions of the exponential carry an arrow.
    """
    a, b = before.instructions, after.instructions
    matcher = difflib.SequenceMatcher(None, [sass.opcode(i) for i in a], [sass.opcode(i) for i in b], autojunk=False)
    groups = [matcher.get_opcodes()] if a == b else matcher.get_grouped_opcodes(context)
    rows: list[tuple[str, str, str]] = []
    for group in groups:
        rows += [("gap", "", "")] if rows else []
        for kind, a0, a1, b0, b1 in group:
            left, right = a[a0:a1], b[b0:b1]
            for i in range(max(len(left), len(right))):
                rows.append((kind, left[i] if i < len(left) else "", right[i] if i < len(right) else ""))
    caption = ". ".join(f"{name}: {_describe(kernel)}" for name, kernel in zip(names, (before, after))) + "."
    body = "".join(_row(*row) for row in rows)
    head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(name)}</th>' for name in names)
    markup = (
        '<div tabindex="0" style="overflow:auto;max-height:40em">'
        f'<table style="{_STYLE}"><caption style="text-align:left">{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    width = max((len(left) for _, left, _ in rows), default=0) + 4
    lines = [f"{_shown(kind, left):<{width}} {_shown(kind, right)}".rstrip() for kind, left, right in rows]
    return Html(markup, "\n".join([caption, *lines]))


def _describe(kernel: Kernel) -> str:
    exponential = sum(bool(re.search(EXPONENTIAL, instruction)) for instruction in kernel.instructions)
    return f"{len(kernel.instructions)} instructions, {exponential} of the exponential, {kernel.registers} registers"


def _row(kind: str, left: str, right: str) -> str:
    if kind == "gap":
        return f'<tr><td colspan="2" style="{_CELL}">…</td></tr>'
    colour = f"background:{_COLOURS[kind]}" if kind in _COLOURS else ""
    cells = (f'<td style="{_CELL}">{html.escape(_shown(kind, text))}</td>' for text in (left, right))
    return f'<tr style="{colour}">{"".join(cells)}</tr>'


def _shown(kind: str, instruction: str) -> str:
    if kind == "gap":
        return "…"
    arrow = "▸ " if re.search(EXPONENTIAL, instruction) else "  "
    return f"{_SIGNS[kind]}{arrow}{instruction}" if instruction else ""
