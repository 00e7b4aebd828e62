"""The figures of the lessons: drawn from tidy data only, so whatever is on one was measured by somebody else.

Each function returns an `AltFigure`: a matplotlib figure whose `alt` states its finding in words. All are drawn on
white; `kda_lab.show` turns them dark where the page is. A marker, a hatch or a word stands wherever a colour carries
meaning.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from PIL import Image

from kda_lab.numeric_range import Format

if TYPE_CHECKING:
    from kda_lab.bench import Row
    from kda_lab.numeric_range import RangeReport
    from kda_lab.registry import Step

INK, PAPER, GREY, SHADE = "#1a1a1a", "#ffffff", "#5c5c5c", "#e3e3e3"
# Searched for: 3:1 or more against the page, and far apart for every kind of colour blindness, light and dark (tested).
BLUE, RED, GREEN, PURPLE, OCHRE, LILAC = "#3050b0", "#c02030", "#36a770", "#7a3870", "#be841d", "#838fcf"
PALETTE = (BLUE, RED, GREEN, PURPLE, OCHRE, LILAC)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class AltFigure(Figure):
    """A figure that carries its finding as text, for `kda_lab.show.show`."""

    alt: str = ""


def figure(width: float, height: float, layout: str = "constrained") -> AltFigure:
    """An empty figure, in inches, drawn without a display and without pyplot's global state."""
    fig = AltFigure(figsize=(width, height), dpi=100, facecolor=PAPER, layout=layout)
    FigureCanvasAgg(fig)
    return fig


def ladder_figure(rows: Sequence[Row], steps: Sequence[Step]) -> AltFigure:
    """Time and error of every step of the ladder; a step without a row, or whose row was refused, is "not measured"."""
    fig = figure(8.8, 1.0 + 0.45 * len(steps))
    time_axes, error_axes = fig.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = [f"{step.number} {step.slug}" for step in steps]
    measured = {row.step: row for row in rows if row.median_ms is not None}
    found = [measured.get(step.number) for step in steps]
    _dots(time_axes, names, [row and row.median_ms for row in found], BLUE, "o", "{:.3g} ms")
    _dots(error_axes, names, [row and row.error_rms for row in found], RED, "s", "{:.2g}")
    time_axes.set(xlabel="median time, ms (log scale)")
    error_axes.set(xlabel="error of the output (log scale)")
    if not measured:
        fig.alt = "Ladder of steps: no step was measured."
        return fig
    by_time = sorted(measured.values(), key=lambda row: row.median_ms)
    fastest, slowest = by_time[0], by_time[-1]
    fig.alt = (
        f"The fastest step is {fastest.step}, {fastest.slug}, at {fastest.median_ms:.3g} ms; "
        f"the slowest is step {slowest.step}, {slowest.slug}, at {slowest.median_ms:.3g} ms, "
        f"{slowest.median_ms / fastest.median_ms:.3g} times as long. Output errors lie between "
        f"{min(row.error_rms for row in by_time):.2g} and {max(row.error_rms for row in by_time):.2g}."
    )
    return fig


def memory_figure(log_decay: Mapping[str, np.ndarray], chunk: int = 16) -> AltFigure:
    """How much of one token's contribution is left n tokens later, for several gates.

    `log_decay` maps a gate's name to its natural log-decays [tokens, H, K]; drawn are the median channel and the middle
    80 % of channels, over the first tokens of the sequence.
    """
    fig = figure(8.4, 3.8)
    axes = fig.subplots()
    tokens = min(len(g) for g in log_decay.values())
    distance = np.arange(1, tokens + 1)
    left = {}
    for (name, g), colour, marker in zip(log_decay.items(), PALETTE, MARKERS, strict=False):
        kept = np.cumsum(g[:tokens], axis=0).reshape(tokens, -1) / math.log(2)
        low, median, high = np.percentile(kept, (10, 50, 90), axis=1)
        axes.fill_between(distance, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(distance, median, color=colour, marker=marker, markevery=(0.1), label=name)
        left[name] = median[min(chunk, tokens) - 1]
    axes.axvline(chunk, color=GREY, linestyle=":", linewidth=1.5)
    axes.text(chunk, 6, f" one chunk of {chunk}", color=INK, va="bottom")
    axes.axhline(-8, color=GREY, linestyle="--", linewidth=1.5)
    axes.text(tokens, -9, "below this, lost in one bf16 rounding ", color=INK, ha="right", va="top")
    axes.set(xlabel="tokens later", ylabel="what is left, log2", xlim=(1, tokens), ylim=(-130, 20))
    axes.legend(loc="lower right", frameon=False)
    _tidy(axes)
    parts = "; ".join(f"{name}: 2^{value:.2g}" for name, value in left.items())
    fig.alt = f"What the median channel keeps of one token's contribution after one chunk of {chunk} tokens. {parts}."
    return fig


def error_by_position_figure(errors: Mapping[str, np.ndarray], title: str) -> AltFigure:
    """An error for each position of a token in its chunk, one line for each named case; arrays of length C."""
    fig = figure(8.4, 3.6)
    axes = fig.subplots()
    for (name, values), colour, marker in zip(errors.items(), PALETTE, MARKERS, strict=False):
        axes.semilogy(range(len(values)), np.maximum(values, 1e-30), color=colour, marker=marker, label=name)
    axes.set(xlabel="position of the token in its chunk", ylabel="relative RMS error", title=title)
    axes.legend(frameon=False, loc="center right")
    _tidy(axes)
    parts = "; ".join(
        f"{name}: {values[0]:.2g} at the first token, {values[-1]:.2g} at the last" for name, values in errors.items()
    )
    fig.alt = f"{title}. {parts}."
    return fig


def chunk_matrices_figure(L: np.ndarray, Mqk: np.ndarray) -> AltFigure:
    """The two triangles of one chunk, [C, C] each: size of each entry as a colour, exact zeros left blank."""
    fig = figure(7.6, 3.6)
    for axes, matrix, name, colours in zip(
        fig.subplots(1, 2), (L, Mqk), ("L", "Mqk"), ("Blues", "Oranges"), strict=True
    ):
        size = np.ma.masked_equal(np.abs(matrix), 0)
        mesh = axes.imshow(size, cmap=colours, vmin=0, vmax=float(size.max()))
        axes.set(title=name, xlabel="from token j", ylabel="to token i")
        fig.colorbar(mesh, ax=axes, label="absolute value", shrink=0.85)
    filled = [int(np.count_nonzero(np.abs(matrix))) for matrix in (L, Mqk)]
    fig.alt = (
        f"L and Mqk of one chunk of {len(L)} tokens. L fills {filled[0]} entries strictly below the diagonal, Mqk "
        f"{filled[1]} with the diagonal: a token never reads from a later one."
    )
    return fig


def stage_times_figure(times: Mapping[str, Mapping[str, float]], title: str = "") -> AltFigure:
    """Milliseconds of each stage (inner keys, in order) for several steps (outer keys), as grouped bars."""
    stages = list(dict.fromkeys(stage for stage_times in times.values() for stage in stage_times))
    fig = figure(8.4, 1.2 + 0.45 * len(stages))
    axes = fig.subplots()
    height = 0.8 / len(times)
    for i, ((name, stage_times), colour, hatch) in enumerate(
        zip(times.items(), PALETTE, ("", "//", "..", "xx"), strict=False)
    ):
        at = np.arange(len(stages)) + (i - (len(times) - 1) / 2) * height
        values = [stage_times.get(stage, 0.0) for stage in stages]
        bars = axes.barh(at, values, height, color=colour, hatch=hatch, edgecolor=PAPER, label=name)
        axes.bar_label(bars, [f"{v:.3g}" if v else "no such stage" for v in values], padding=4, fontsize=9)
    axes.set(yticks=range(len(stages)), yticklabels=stages, xlabel="ms", title=title)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="best")
    _tidy(axes)
    parts = []
    for name, stage_times in times.items():
        longest = max(stage_times, key=stage_times.__getitem__)
        share = stage_times[longest] / sum(stage_times.values())
        parts.append(f"{name} spends {share:.0%} of its time in {longest}")
    fig.alt = f"Time of each stage: {'; '.join(parts)}."
    return fig


def times_by_chunk_figure(times: Mapping[str, Mapping[int, float]]) -> AltFigure:
    """Milliseconds against the chunk's length (inner keys) for several steps (outer keys)."""
    fig = figure(7.2, 3.4)
    axes = fig.subplots()
    parts = []
    for (name, by_chunk), colour, marker in zip(times.items(), PALETTE, MARKERS, strict=False):
        axes.plot(list(by_chunk), list(by_chunk.values()), color=colour, marker=marker, label=name)
        low, high = min(by_chunk), max(by_chunk)
        parts.append(
            f"{name} takes {by_chunk[high] / by_chunk[low]:.2g} times as long at chunk {high} as at chunk {low}"
        )
    chunks = sorted({chunk for by_chunk in times.values() for chunk in by_chunk})
    axes.set_xscale("log", base=2)
    axes.set(xticks=chunks, xticklabels=chunks, xlabel="chunk, tokens", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _tidy(axes)
    fig.alt = f"Time against the chunk's length: {'; '.join(parts)}."
    return fig


def error_by_regime_figure(errors: Mapping[str, Mapping[str, float | None]], of: str = "output") -> AltFigure:
    """Error of the output, or whatever `of` says, for each regime (inner keys), a marker for each step (outer keys)."""
    regimes = list(dict.fromkeys(regime for by_regime in errors.values() for regime in by_regime))
    fig = figure(7.6, 1.1 + 0.45 * len(regimes))
    axes = fig.subplots()
    axes.set_xscale("log")
    for i, ((name, by_regime), colour, marker) in enumerate(zip(errors.items(), PALETTE, MARKERS, strict=False)):
        at = np.arange(len(regimes)) + 0.14 * (i - (len(errors) - 1) / 2)
        values = [by_regime.get(regime) or math.nan for regime in regimes]
        axes.plot(values, at, marker, color=colour, label=name, markersize=7)
    axes.set(yticks=range(len(regimes)), yticklabels=regimes, xlabel=f"error of the {of} against float64 (log scale)")
    axes.set_ylim(len(regimes) - 0.5, -0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, high / 100), high * 2)  # two decades at least: small differences are to look small
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _tidy(axes)
    measured = [(e, name, regime) for name, by in errors.items() for regime, e in by.items() if e is not None]
    worst = max(measured, default=None)
    fig.alt = (
        f"Error of the {of} for each regime and step: the largest is {worst[0]:.2g}, {worst[1]} in {worst[2]}."
        if worst
        else f"Error of the {of} for each regime and step: not measured."
    )
    return fig


def error_by_bound_figure(reports: Sequence[RangeReport]) -> AltFigure:
    """Two measured errors against lower_bound: the native fp32 step's and the bf16 mirror's. NaN is a cross on top."""
    fig = figure(8.4, 3.8)
    axes = fig.subplots()
    axes.set_yscale("log")
    bounds = np.array([report.lower_bound for report in reports])
    top = 30.0
    finding = []
    series = (
        ("compiled step, fp32 factors", "native_error", GREEN, "o", 14),
        ("rounding mirror, bf16 factors", "mirror_error", RED, "s", 8),
    )
    for name, field, colour, marker, size in series:
        error = np.array([_nan_if_missing(getattr(report, field)) for report in reports])
        axes.plot(bounds, error, color=colour, marker=marker, label=name)
        gone = np.isnan(error)
        if gone.any():
            axes.plot(bounds[gone], np.full(gone.sum(), top), "x", color=colour, markersize=size, markeredgewidth=2.5)
            finding.append(f"{name} is NaN from {bounds[gone].max():.4g} down")
        if not gone.all():
            worst = int(np.nanargmax(error))
            finding.append(f"{name} reaches {error[worst]:.2g} at {bounds[worst]:.4g} while still finite")
    axes.axhline(top, color=GREY, linewidth=1)
    axes.text(bounds.max(), top, "NaN ", ha="left", va="bottom", color=INK)
    axes.set(xlabel="lower_bound", ylabel="error against float64", ylim=(1e-4, 100))
    axes.invert_xaxis()
    axes.legend(frameon=False, loc="center left")
    _tidy(axes)
    fig.alt = f"Error against lower_bound, chunk {reports[0].chunk}, gate {reports[0].gate}: {'; '.join(finding)}."
    return fig


def range_figure(report: RangeReport) -> AltFigure:
    """exp(G) and exp(-G) over a chunk beside what the dtype can hold, and the two errors measured at this setting."""
    picture = RangePicture()
    picture.update(report)
    return picture.figure


class MovingPicture:
    """A figure of which a few artists move, so that an explorer redraws only those; `finish` names them."""

    def __init__(self, fig: AltFigure) -> None:
        self.figure = fig
        self._moving: list[Artist] = []
        self._background: Any = None

    def finish(self, moving: Sequence[Artist]) -> None:
        """Animated artists are left out of the background that png() keeps; savefig() draws them like any other."""
        self._moving = list(moving)
        for artist in self._moving:
            artist.set_animated(True)

    def png(self) -> bytes:
        """The picture as PNG, in a fraction of the time that savefig() takes."""
        canvas = self.figure.canvas
        if self._background is None:
            canvas.draw()
            self._background = canvas.copy_from_bbox(self.figure.bbox)
        canvas.restore_region(self._background)
        for artist in self._moving:
            self.figure.draw_artist(artist)
        buffer = io.BytesIO()
        Image.fromarray(np.asarray(canvas.buffer_rgba())).save(buffer, "png", compress_level=1)
        return buffer.getvalue()


class RangePicture(MovingPicture):
    """The range figure as an object."""

    def __init__(self) -> None:
        # Fixed margins: a layout engine would cost more than the drawing.
        super().__init__(figure(8.8, 3.6, layout="none"))
        self.figure.subplots_adjust(left=0.085, right=0.98, bottom=0.16, top=0.76, wspace=0.34)
        self._range, self._error = self.figure.subplots(1, 2, width_ratios=(2.1, 1))
        self._title = self._range.text(0.02, 0.97, "", va="top", fontsize=11.5, transform=self.figure.transFigure)
        self._zones = [self._range.axvspan(0, 1, color=SHADE, zorder=0) for _ in range(2)]
        self._zone_names = [self._range.text(0, 1.94, "", ha="center", fontsize=9.5) for _ in range(2)]
        self._spans = [_Span(self._range, *place) for place in ((1, BLUE, "o"), (0, OCHRE, "s"))]
        self._range.axvline(0, color=GREY, linewidth=1, zorder=1)
        self._range.set(ylim=(-0.6, 1.9), yticks=(1, 0), yticklabels=("exp(G)", "exp(−G)"), xlabel="log2 of the factor")
        self._errors = [_Error(self._error, *place) for place in ((1, GREEN, "^"), (0, RED, "D"))]
        self._error.set_xscale("log")
        self._error.set(xlim=(1e-4, 20), ylim=(-0.6, 1.9), xlabel="error against float64 (log scale)")
        self._error.set(yticks=(1, 0), yticklabels=("compiled\nfp32", "mirror\nbf16"))
        self._error.xaxis.set_minor_formatter(NullFormatter())
        for axes in (self._range, self._error):
            _tidy(axes)
        self.finish([self._title, *(a for part in (*self._spans, *self._errors) for a in part.artists)])
        self._dtype: str | None = None

    def update(self, report: RangeReport) -> None:
        """Move everything to another report."""
        if report.dtype != self._dtype:
            self._show_limits(report.dtype)
        for span, (low, high) in zip(self._spans, (report.exp_pos_log2, report.exp_neg_log2), strict=True):
            span.move(low, high, self._edge)
        for dot, error in zip(self._errors, (report.native_error, report.mirror_error), strict=True):
            dot.move(error)
        self._title.set_text(
            f"lower_bound {report.lower_bound:g}, chunk {report.chunk}, {report.dtype}\n{report.verdict}"
        )
        setting, verdict, ranges, *_ = report.describe().splitlines()
        self.figure.alt = f"{setting}. {verdict} {ranges}."

    def _show_limits(self, dtype: str) -> None:
        limits = Format.of(dtype)
        smallest, largest = limits.smallest / math.log(2), limits.largest / math.log(2)
        edge = 1.6 * max(largest, -smallest)
        self._range.set_xlim(-edge, edge)
        shaded = ((-edge, smallest, "becomes 0"), (largest, edge, "overflows"))
        for zone, text, (low, high, what) in zip(self._zones, self._zone_names, shaded, strict=True):
            zone.set_x(low)
            zone.set_width(high - low)
            text.set(x=(low + high) / 2, text=f"{dtype}: {what}")
        self._dtype, self._edge, self._background = dtype, edge, None


class _Span:
    """From the smallest to the largest value of one factor, with both written above; an arrow where the axis ends."""

    def __init__(self, axes: Axes, y: float, colour: str, marker: str) -> None:
        self._y = y
        (self._bar,) = axes.plot([], [], color=colour, marker=marker, linewidth=7, markersize=10)
        self._ends = [axes.text(0, y + 0.25, "", color=INK, fontsize=11) for _ in range(2)]
        self.artists = (self._bar, *self._ends)

    def move(self, low: float, high: float, edge: float) -> None:
        """`low` and `high` in log2; the axis shows -edge to edge."""
        shown = np.clip([low, high], -0.95 * edge, 0.95 * edge)
        self._bar.set_data(shown, [self._y, self._y])
        for end, x, value, side in zip(self._ends, shown, (low, high), ("right", "left"), strict=True):
            text = f"2^{round(value, 1) + 0.0}"  # + 0.0: no -0.0; plain, as parsing mathtext is slow
            end.set_text(text if abs(value) < edge else f"{text}→" if value > 0 else f"←{text}")
            end.set(x=x, ha="left" if x < -0.8 * edge else "right" if x > 0.8 * edge else side)


class _Error:
    """One measured error on a log axis, its value written above it."""

    def __init__(self, axes: Axes, y: float, colour: str, marker: str) -> None:
        self._y = y
        (self._dot,) = axes.plot([], [], marker, color=colour, markersize=10)
        self._text = axes.text(0, y + 0.22, "", color=INK, fontsize=10, ha="center")
        self.artists = (self._dot, self._text)

    def move(self, error: float | None) -> None:
        if error is None:
            self._dot.set_data([], [])
            self._text.set(text="not measured", x=4e-2)
            return
        x = 8.0 if math.isnan(error) else min(max(error, 2e-4), 8.0)
        self._dot.set_data([x], [self._y])
        self._text.set(text="NaN" if math.isnan(error) else f"{error:.2g}", x=max(x, 4e-4))


def _dots(axes: Axes, names: list[str], values: list[float | None], colour: str, marker: str, label: str) -> None:
    """One marker a name on a log axis, its value written beside it; "not measured" where there is none."""
    axes.set_xscale("log")
    known = [value for value in values if value is not None and value > 0]
    left = min(known, default=1.0)
    for y, value in enumerate(values):
        if value is None:
            axes.text(left, y, "not measured", va="center", color=GREY)
        else:
            axes.plot([left / 2, value], [y, y], color=colour, linewidth=1, alpha=0.6)
            axes.plot([value], [y], marker, color=colour, markersize=9)
            axes.annotate(label.format(value), (value, y), (9, 0), textcoords="offset points", va="center")
    axes.set(yticks=range(len(names)), yticklabels=names)
    axes.set_xlim(left / 2, max(5 * left, max(known, default=1.0)) * 6)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(len(names) - 0.5, -0.5)
    _tidy(axes)


def _nan_if_missing(value: float | None) -> float:
    return math.nan if value is None else value


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)
