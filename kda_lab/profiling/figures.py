"""Figures of what profilers measured, drawn from a Timeline, a Report or points; alt text states the finding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from kda_lab.plots import BLUE, GREEN, GREY, INK, LILAC, MARKERS, OCHRE, PALETTE, PAPER, PURPLE, AltFigure, figure
from kda_lab.profiling import metrics, roofline
from kda_lab.profiling.ncu import Report
from kda_lab.profiling.roofline import Point
from kda_lab.profiling.timeline import Span, Timeline
from kda_lab.show import number

_COLOURS = {"range": LILAC, "projected": LILAC, "launch": OCHRE, "kernel": BLUE, "copy": PURPLE}
TINT = 0.25
_WORDS = {
    "range": "range on the host",
    "launch": "CUDA call",
    "projected": "range on the GPU",
    "kernel": "kernel",
    "copy": "copy",
}


def timeline_figure(
    timeline: Timeline, start_us: float = 0.0, end_us: float | None = None, title: str = ""
) -> AltFigure:
    """Host ranges and calls above, the GPU's ranges, kernels and copies below, between two times in microseconds."""
    end_us = timeline.duration_us if end_us is None else end_us
    shown = timeline.between(start_us, end_us)
    lanes = list(dict.fromkeys(sorted(((_lane(span)) for span in shown.spans), key=_lane_order)))
    fig = figure(9.6, 1.3 + 0.36 * max(len(lanes), 1))
    axes = fig.subplots()
    for span in shown.spans:
        y = lanes.index(_lane(span))
        left, right = max(span.start_us, start_us), min(span.end_us, end_us)
        axes.barh(y, right - left, left=left, height=0.8, **_block(span.kind))
        if right - left > 0.012 * len(span.name) * (end_us - start_us):
            axes.text((left + right) / 2, y, span.name, ha="center", va="center", fontsize=8, color=INK, clip_on=True)
    axes.set(xlim=(start_us, end_us), xlabel="µs", title=title, yticks=range(len(lanes)))
    axes.set_yticklabels([lane[1] for lane in lanes], fontsize=8)
    axes.invert_yaxis()
    kinds = [kind for kind in _WORDS if any(span.kind == kind for span in shown.spans)]
    axes.legend(
        handles=[Patch(**_block(kind), label=_WORDS[kind]) for kind in kinds if kind != "projected"],
        fontsize=8,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )
    _clean(axes)
    fig.alt = describe_timeline(shown, start_us, end_us)
    return fig


def _block(kind: str) -> dict[str, Any]:
    """A border in the kind's colour and a tint of it inside, on which a name is legible."""
    return {"edgecolor": _COLOURS[kind], "facecolor": to_rgba(_COLOURS[kind], TINT), "linewidth": 1.0}


def describe_timeline(timeline: Timeline, start_us: float, end_us: float) -> str:
    """What a timeline shows between two times, in words."""
    kernels = timeline.of("kernel")
    where = f" on {timeline.gpu}" if timeline.gpu else ""
    head = f"Timeline by {timeline.tool}{where}, {start_us:,.0f} to {end_us:,.0f} µs: "
    if not kernels:
        ranges = [span for span in timeline.of("range") if span.depth > 0] or timeline.of("range")
        longest = max(ranges, key=lambda span: span.duration_us, default=None)
        if longest is None:
            return f"{head}no kernel on the GPU; nothing ran."
        lasts = f"{number(longest.duration_us)} µs"
        return f"{head}no kernel on the GPU; {longest.name} is the longest range, {lasts}."
    totals = {name: 0.0 for name in dict.fromkeys(span.name for span in kernels)}
    for span in kernels:
        totals[span.name] += min(span.end_us, end_us) - max(span.start_us, start_us)
    busy = sum(totals.values())
    most = max(totals, key=totals.__getitem__)
    return (
        f"{head}{len(kernels)} kernels take {busy / (end_us - start_us):.0%} of it; {most} takes most, "
        f"{number(totals[most])} µs in {sum(span.name == most for span in kernels)} launches."
    )


def roofline_figure(points: Sequence[Point], ceilings: Mapping[str, Any], title: str = "") -> AltFigure:
    """Operations a second against operations a byte, below the measured ceilings of memory and both cores."""
    fig = figure(8.4, 4.4)
    axes = fig.subplots()
    axes.set(xscale="log", yscale="log")
    left = min((at.intensity for at in points), default=1.0) / 4
    right = max([at.intensity for at in points] + [4 * ceilings["bf16_flops_per_s"] / ceilings["copy_bytes_per_s"]])
    for key, name, style in (
        ("bf16_flops_per_s", "tensor cores, bf16", "-"),
        ("fp32_flops_per_s", "CUDA cores, fp32", "--"),
    ):
        top = ceilings[key]
        knee = top / ceilings["copy_bytes_per_s"]
        axes.plot([left, knee, right], [left * ceilings["copy_bytes_per_s"], top, top], style, color=INK, linewidth=1.5)
        axes.text(right, top * 1.1, f"{name}: {top / 1e12:.3g} TFLOP/s", ha="right", fontsize=9)
    slope_at = left * 1.3
    axes.text(
        slope_at,
        slope_at * ceilings["copy_bytes_per_s"] * 1.5,
        f"{ceilings['copy_bytes_per_s'] / 1e12:.3g} TB/s",
        fontsize=9,
    )
    for at, colour, marker in _cycled(points):
        axes.plot(at.intensity, at.flops_per_s, marker, color=colour, markersize=10, label=at.name, linestyle="none")
    axes.set(xlabel="operations of the algorithm per byte moved", ylabel="operations a second", title=title)
    axes.set_ylim(top=3 * ceilings["bf16_flops_per_s"])
    axes.yaxis.set_minor_formatter(NullFormatter())
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _clean(axes)
    fig.alt = (
        f"Roofline: {'; '.join(_roofline_words(at, ceilings) for at in points)}."
        if points
        else "Roofline: not measured."
    )
    return fig


def floors_figure(points: Sequence[Point], ceilings: Mapping[str, Any], title: str = "") -> AltFigure:
    """Each step's time beside the shortest times that memory, arithmetic and exponentials allow for what it does."""
    fig = figure(8.8, 1.2 + 0.62 * max(len(points), 1))
    axes = fig.subplots()
    axes.set_xscale("log")
    kinds = ("memory", "tensor cores", "CUDA cores", "exponentials")
    findings = []
    for y, at in enumerate(points):
        allowed = roofline.floors(at, ceilings)
        axes.barh(y, 1e6 * at.time_s, height=0.6, color="#d9d9d9", edgecolor=GREY, zorder=1)
        for kind, colour, marker in zip(kinds, PALETTE, MARKERS):
            if allowed[kind] is not None:
                label = kind if y == 0 else None
                axes.plot(
                    1e6 * allowed[kind], y, marker, color=colour, markersize=9, linestyle="none", label=label, zorder=2
                )
        # Products on tensor cores may break the floor by CUDA cores; then it is none.
        standing = [kind for kind in kinds if allowed[kind] and (kind != "CUDA cores" or allowed[kind] <= at.time_s)]
        nearest = max(standing, key=lambda kind: allowed[kind])
        findings.append(f"{at.name} takes {at.time_s / allowed[nearest]:.3g} times its floor by {nearest}")
    names = [f"{at.name}\n{number(1e6 * at.time_s)} µs" for at in points]  # beside the bars: a marker may be anywhere
    axes.set(yticks=range(len(points)), yticklabels=names, xlabel="µs (log scale)", title=title)
    axes.invert_yaxis()
    axes.margins(x=0.05)
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5), title="floor by")
    _clean(axes)
    fig.alt = f"Time and floors: {'; '.join(findings) or 'not measured'}."
    return fig


def stall_figure(reports: Mapping[str, Report], kernel: str, top: int = 6, title: str = "") -> AltFigure:
    """What warps of one kernel wait for, for several steps: cycles between two instructions of a warp, by reason."""
    found = {name: metrics.stalls(report, kernel) for name, report in reports.items() if kernel in report.kernels}
    found = {name: stalls for name, stalls in found.items() if stalls}
    reasons = sorted(
        {r for stalls in found.values() for r in stalls}, key=lambda r: -max(s.get(r, 0) for s in found.values())
    )
    reasons = reasons[:top]
    fig = figure(9.2, 1.4 + (0.2 + 0.22 * max(len(found), 1)) * max(len(reasons), 1))
    axes = fig.subplots()
    height = 0.8 / max(len(found), 1)
    for i, ((name, stalls), colour, hatch) in enumerate(
        zip(found.items(), PALETTE, ("", "//", "..", "xx", "\\\\", "++"))
    ):
        at = [y + (i - (len(found) - 1) / 2) * height for y in range(len(reasons))]
        values = [stalls.get(reason, 0.0) for reason in reasons]
        bars = axes.barh(at, values, height, color=colour, hatch=hatch, edgecolor=PAPER, label=name)
        axes.bar_label(bars, [f"{value:.2g}" for value in values], padding=3, fontsize=8)
    axes.set(yticks=range(len(reasons)), xlabel="cycles between two instructions of a warp", title=title or kernel)
    axes.set_yticklabels(reasons, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    _legend(axes)
    _clean(axes)
    words = [f"in {name}, {_stall_words(next(iter(stalls)))}" for name, stalls in found.items()]
    fig.alt = f"What warps of {kernel} wait for: {'; '.join(words) or 'not measured'}."
    return fig


def occupancy_figure(reports: Mapping[str, Report], title: str = "") -> AltFigure:
    """Occupancy reached and possible of every kernel of several steps, and what limits it."""
    kernels = [
        (name, kernel, metrics.occupancy(report, kernel))
        for name, report in reports.items()
        for kernel in report.kernels
    ]
    kernels = [entry for entry in kernels if entry[2]["reached"] is not None]
    fig = figure(8.8, 1.2 + 0.42 * max(len(kernels), 1))
    axes = fig.subplots()
    for y, (_, _, occupancy) in enumerate(kernels):
        axes.barh(y, occupancy["reached"], height=0.55, color=GREEN, label="reached" if y == 0 else None)
        if occupancy["possible"] is not None:
            axes.plot(occupancy["possible"], y, "|", color=INK, markersize=16, label="possible" if y == 0 else None)
        limit = f", limited by {occupancy['limited_by']}" if occupancy["limited_by"] else ""
        axes.text(101, y, f"{occupancy['reached']:.0f} %{limit}", va="center", fontsize=9)
    axes.set(xlim=(0, 100), yticks=range(len(kernels)), xlabel="% of the warps a multiprocessor can hold")
    axes.set_title(title, pad=26)  # above the legend
    axes.set_yticklabels([f"{name}: {kernel}" for name, kernel, _ in kernels], fontsize=9)
    axes.invert_yaxis()
    _legend(axes, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    _clean(axes)
    words = [f"{kernel} of {name} reaches {o['reached']:.0f} %, {_limit_words(o)}" for name, kernel, o in kernels]
    fig.alt = f"Occupancy: {'; '.join(words) or 'not measured'}."
    return fig


def _stall_words(longest: str) -> str:
    issues = longest == metrics.STALLS["selected"]
    return "no wait is longer than the issuing" if issues else f"warps mostly wait for {longest}"


def _limit_words(occupancy: Mapping[str, Any]) -> str:
    return f"limited by {occupancy['limited_by']}" if occupancy["limited_by"] else "its limit not measured"


def _roofline_words(at: Point, ceilings: Mapping[str, Any]) -> str:
    share = at.bytes / at.time_s / ceilings["copy_bytes_per_s"]
    rate = f"{at.flops_per_s / 1e12:.3g} TFLOP/s"
    return f"{at.name} does {rate} at {at.intensity:.3g} operations a byte, {share:.0%} of the copy bandwidth"


def _lane(span: Span) -> tuple[str, str, int, str]:
    """(host or GPU, label, depth, kind): the row of the timeline that a span is drawn in."""
    host = span.kind in ("range", "launch")
    kind = "copy" if span.kind == "kernel" else span.kind  # kernels and copies of a stream share its row
    if span.kind == "launch":
        return ("0 host", f"{span.track}, calls", 1000, kind)
    label = f"{span.track}, ranges" if span.kind in ("range", "projected") else span.track
    return ("0 host" if host else "1 GPU", label, span.depth if span.kind in ("range", "projected") else 1000, kind)


def _lane_order(lane: tuple[str, str, int, str]) -> tuple[str, str, int]:
    return (lane[0], lane[1].split(",")[0], lane[2])


def _cycled(points: Sequence[Point]) -> Iterator[tuple[Point, str, str]]:
    """A colour and a marker for each point; as many markers as steps, so that no two look alike without colour."""
    return zip(points, itertools.cycle(PALETTE), itertools.cycle(MARKERS))


def _legend(axes: Axes, **where: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, **where)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(GREY)
