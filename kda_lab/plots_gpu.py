"""The figures of lessons 2 and 4 to 6: where data is and moves, what roundings cost, and one exponential in every form.

As in kda_lab.plots: drawn from tidy data only, each an AltFigure whose `alt` states its finding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from kda_lab.dataflow import PLACES, REGISTER_BYTES, SHARED_BYTES_PER_CTA, Move, Piece, Residency
from kda_lab.expforms import Form
from kda_lab.plots import BLUE, GREY, INK, MARKERS, OCHRE, PALETTE, PAPER, RED, AltFigure, MovingPicture, figure

_AROUND = 4  # measured points on either side whose largest error is drawn
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")


def moved_bytes_figure(
    moves: Mapping[str, Sequence[Move]], measured: Mapping[str, float] | None = None, label: str = "measured"
) -> AltFigure:
    """Bytes a token and head that every step (key) moves in device memory, counted; a marker where measured, too.

    label: says of the measured ones where and when.
    """
    fig = figure(8.8, 1.4 + 0.42 * len(moves))
    axes = fig.subplots()
    measured = measured or {}
    totals, marked = {}, False
    for y, (name, of_step) in enumerate(moves.items()):
        outer = sum(move.bytes for move in of_step if not move.between_kernels)
        inner = sum(move.bytes for move in of_step if move.between_kernels)
        totals[name] = outer + inner
        labels = ("inputs and outputs", "from kernel to kernel") if y == 0 else (None, None)
        axes.barh(y, outer, 0.6, color=BLUE, label=labels[0])
        axes.barh(y, inner, 0.6, left=outer, color=OCHRE, hatch="//", edgecolor=PAPER, label=labels[1])
        if name in measured:
            axes.plot(measured[name], y, "D", color=INK, label=label if not marked else None, linestyle="none")
            marked = True
        axes.text(max(totals[name], measured.get(name, 0)), y, f"  {totals[name]:,.0f} B", va="center", fontsize=9)
    least = min(totals.values())
    axes.axvline(least, color=GREY, linestyle=":", linewidth=1.5)
    axes.set(yticks=range(len(moves)), yticklabels=list(moves), xlabel="bytes a token and head, in device memory")
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right")
    _clean(axes)
    words = [
        f"{name} {total:,.0f}" + (f" (measured {measured[name]:,.0f})" if name in measured else "")
        for name, total in totals.items()
    ]
    fig.alt = f"Bytes a token and head moved in device memory: {', '.join(words)}. The least possible is {least:,.0f}."
    return fig


def memory_figure(machine: Mapping[str, Any], H: int = 96, head_size: int = 128) -> AltFigure:
    """The memories of a GPU by size, beside what has to go somewhere: one chunk, one state, all states.

    machine: a recording's, of compute capability 9.0: "gpu", "multiprocessors", "l2_bytes", "memory_bytes".
    """
    memories = {  # bytes of the whole GPU
        "registers": machine["multiprocessors"] * REGISTER_BYTES,
        "shared memory": machine["multiprocessors"] * SHARED_BYTES_PER_CTA,
        "L2 cache": machine["l2_bytes"],
        "device memory": machine["memory_bytes"],
    }
    state = head_size * head_size * 4
    wanted = {"one chunk of one head": 4 * 16 * head_size * 2, "one state": state, f"{H} states": H * state}
    fig = figure(8.8, 3.2)
    axes = fig.subplots()
    axes.set_xscale("log")
    for y, size in enumerate(memories.values()):
        axes.barh(y, size, 0.55, left=1e3, color=PALETTE[y], hatch=_HATCHES[y], edgecolor=PAPER)
        axes.text(size * 1.3, y, _size(size), va="center", fontsize=9)
    for i, (name, size) in enumerate(wanted.items()):
        axes.axvline(size, color=INK, linestyle=":", linewidth=1.5)
        axes.text(size, -1.3 + 0.4 * i, f"  {name}, {_size(size)}", va="bottom", fontsize=9)
    axes.set(yticks=range(len(memories)), yticklabels=list(memories), xlim=(4e3, 2e13), xlabel="bytes (log scale)")
    axes.set_ylim(len(memories) - 0.5, -1.8)
    axes.set_title(machine["gpu"], loc="left", fontsize=11)
    _clean(axes)
    sizes = ", ".join(f"{name} {_size(size)}" for name, size in (memories | wanted).items())
    fig.alt = f"Memories of one {machine['gpu']}, and what a kernel would keep in them: {sizes}."
    return fig


def _size(count: float) -> str:
    for unit, size in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def on_chip_figure(kernel: str, pieces: Sequence[Piece], fits: Residency, setting: str) -> AltFigure:
    """What one CTA holds in registers and in shared memory, beside what there is of each."""
    fig = figure(9.0, 3.4, layout="none")  # fixed margins: a layout engine would cost more than the drawing
    fig.subplots_adjust(left=0.15, right=0.98, bottom=0.38, top=0.82)
    axes = fig.subplots()
    capacity = dict(zip(PLACES, (REGISTER_BYTES, SHARED_BYTES_PER_CTA), strict=True))
    held = {place: sum(piece.bytes for piece in pieces if piece.where == place) for place in PLACES}
    edge = 1.3 * max(*capacity.values(), *held.values()) / 1024
    left = dict.fromkeys(PLACES, 0.0)
    for i, piece in enumerate(pieces):
        y, size = PLACES.index(piece.where), piece.bytes / 1024
        colour, hatch = PALETTE[i % len(PALETTE)], _HATCHES[i % len(_HATCHES)]
        label = f"{piece.name}: {size:,.4g} KB"
        axes.barh(
            y, size, 0.5, left=left[piece.where], color=colour, hatch=hatch, edgecolor=PAPER, linewidth=0.5, label=label
        )
        left[piece.where] += size
    for y, place in enumerate(PLACES):
        limit = capacity[place] / 1024
        axes.plot([limit, limit], [y - 0.38, y + 0.38], color=INK, linewidth=2.5)
        axes.text(limit, y - 0.26, f"  {limit:.0f} KB there are", va="bottom", fontsize=9, color=INK)
    axes.set(xlim=(0, edge), ylim=(1.5, -0.6), yticks=(0, 1), yticklabels=PLACES, xlabel="KB of one CTA")
    axes.set_title(f"{kernel}, {setting}\n{describe_residency(fits)}", loc="left", x=-0.15, fontsize=10)
    fig.legend(frameon=False, fontsize=9, ncols=3, loc="lower left", bbox_to_anchor=(0.02, 0.0))
    _clean(axes)
    sizes = " and ".join(f"{held[place] / 1024:,.4g} KB of {place}" for place in PLACES)
    fig.alt = f"{kernel}, {setting}: one CTA holds {sizes}. {describe_residency(fits)}."
    return fig


def describe_residency(fits: Residency) -> str:
    """How many CTAs fit and why no more, in words."""
    if fits.ctas == 0:
        return f"not even one CTA fits, for its {fits.limited_by}"
    ctas = "1 CTA" if fits.ctas == 1 else f"{fits.ctas} CTAs"
    counted = "of these pieces alone" if fits.compiled_registers is None else f"{fits.compiled_registers} a thread"
    limit = fits.limited_by.replace("registers", f"registers ({counted})")
    return f"at most {ctas} on a multiprocessor, limited by {limit}: occupancy {fits.occupancy:.0%}"


def rounding_figure(errors: Mapping[str, tuple[float, float]], title: str = "") -> AltFigure:
    """Errors of (output, state) for named choices of roundings, on a log axis; NaN at its right end."""
    picture = RoundingPicture(tuple(errors))
    picture.update(errors, title)
    return picture.figure


class RoundingPicture(MovingPicture):
    """The rounding figure as an object, for fixed names of the choices."""

    _LOW, _HIGH = 1e-8, 100.0

    def __init__(self, names: Sequence[str]) -> None:
        height, left = 1.3 + 0.42 * len(names), 0.04 + 0.011 * max(map(len, names))
        super().__init__(figure(8.6, height, layout="none"))
        self.figure.subplots_adjust(left=left, right=0.97, bottom=0.55 / height, top=1 - 0.55 / height)
        axes = self.figure.subplots()
        axes.set_xscale("log")
        axes.set(yticks=range(len(names)), yticklabels=names, xlim=(self._LOW / 2, 30 * self._HIGH))
        axes.set(xlabel="relative RMS error against float64 (log scale)")
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.xaxis.set_minor_formatter(NullFormatter())
        self._title = axes.set_title("", loc="left", fontsize=11)
        self._dots, self._values = [], []
        for i, (name, colour, marker) in enumerate((("output", BLUE, "o"), ("final state", RED, "s"))):
            at = [y + 0.16 * (2 * i - 1) for y in range(len(names))]
            self._dots += axes.plot([1.0] * len(at), at, marker, color=colour, markersize=8, label=name)
            self._values.append([axes.text(1.0, y, "", va="center", fontsize=9) for y in at])
        self.figure.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
        _clean(axes)
        self.finish([self._title, *self._dots, *(text for texts in self._values for text in texts)])

    def update(self, errors: Mapping[str, tuple[float, float]], title: str) -> None:
        """Move everything to other errors of the same choices."""
        for i, (dots, texts) in enumerate(zip(self._dots, self._values, strict=True)):
            found = [pair[i] for pair in errors.values()]
            shown = [self._HIGH if math.isnan(x) else min(max(x, self._LOW), self._HIGH) for x in found]
            dots.set_xdata(shown)
            for text, x, error in zip(texts, shown, found, strict=True):
                text.set(x=1.5 * x, text="NaN" if math.isnan(error) else f"{error:.2g}")
        self._title.set_text(title)
        words = [f"{name}: output {pair[0]:.2g}, state {pair[1]:.2g}" for name, pair in errors.items()]
        self.figure.alt = f"{title + '. ' if title else ''}Errors against float64. {'; '.join(words)}."


def exponent_figure(forms: Sequence[Form], x: float, title: str = "") -> AltFigure:
    """Error in ulp of every form that was measured, the largest around each x; what was not measured is named."""
    fig = figure(9.0, 3.8, layout="none")
    fig.subplots_adjust(left=0.08, right=0.64, bottom=0.15, top=0.88)
    axes = fig.subplots()
    words = []
    for number, (form, colour, marker) in enumerate(zip(forms, PALETTE, MARKERS, strict=False)):
        label = f" {form.name}"  # a label that begins with _, as __expf does, would not be in the legend
        if not form.measured:
            axes.plot([], [], marker, color=colour, label=f"{label}: not measured", linestyle="none")
            words.append(f"{form.name}: not measured")
            continue
        nearby = [max(form.ulp[max(0, i - _AROUND) : i + _AROUND + 1]) for i in range(len(form.ulp))]
        apart = (4 * number, 24)  # forms that give the same values share a line, and their markers take turns on it
        axes.plot(form.x, nearby, color=colour, marker=marker, markevery=apart, linewidth=1.5, label=label)
        words.append(f"{form.name} is off by {form.ulp_at(x):.2g} ulp there and by {max(form.ulp):.2g} at most")
    axes.axvline(x, color=GREY, linestyle=":", linewidth=1.5)
    axes.set(xlabel="x", ylabel="largest error nearby, ulp of fp32", title=title)
    axes.set_yscale("log")
    axes.set(xlim=(-82.0, 82.0), ylim=(0.05, 300.0))
    if not any(form.measured for form in forms):
        axes.text(0.0, 4.0, "errors not measured", ha="center", color=GREY, fontsize=12, backgroundcolor=PAPER)
    fig.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0.645, 0.5))
    _clean(axes)
    fig.alt = f"{title + '. ' if title else ''}Error at x = {x:g}: {'; '.join(words)}."
    return fig


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)
