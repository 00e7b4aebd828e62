"""What the lessons show of a recording: every view takes one, or None, and says "not measured" for what is missing.

    recording = recorded.load()
    show(views.timeline(recording, 5))          # a figure
    views.counters(recording, 5)                # a table

Figures and tables carry the recording's label, so that no number stands without its machine and date.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kda_lab import dataflow, expforms, plots_gpu, registry
from kda_lab.plots import GREY, AltFigure, error_by_regime_figure, figure
from kda_lab.profiling import evidence, figures, metrics, ncu, roofline, sass_view
from kda_lab.profiling.ncu import Report
from kda_lab.profiling.recorded import Recording
from kda_lab.profiling.tools import ToolMissing
from kda_lab.sass import pipe
from kda_lab.show import NOT_MEASURED, Html, table

Step = int | str
_SHORT_MS = 0.01  # with a shorter one among them, times are shown in µs
LONG_US = 100  # from here on what an event or a range costs by itself no longer counts


def timeline(recording: Recording | None, step: Step, tool: str = "nsys") -> AltFigure:
    """Ranges, calls and kernels of one step. tool: "nsys" or "torch"."""
    found = getattr(recording, tool)(step) if recording else None
    if found is None:
        return _nothing(f"Timeline of step {step} by {tool}")
    label = recording.label_of(tool)
    return _labelled(figures.timeline_figure(found, title=f"{_name(step)}, {label}"), label)


def timeline_explorer(recording: Recording | None, step: Step) -> Any:
    """The same to zoom into: a widget, or the words "not measured"."""
    from kda_lab.profiling import explorer

    found = recording.nsys(step) if recording else None
    if found is None:
        return _words(f"Timeline of step {step}")
    return explorer.timeline_explorer(found, f"{_name(step)}, {recording.label_of('nsys')}")


def counters(recording: Recording | None, step: Step) -> Html:
    """Nsight Compute's numbers of one step's kernels in plain words, the tool's own names beside them."""
    report = _reports(recording, [step]).get(_name(step))
    if report is None:
        return _words(f"Counters of step {step}", _no_report())
    columns = {"what": "What", "unit": "Unit", **{kernel: kernel for kernel in report.kernels}, "raw": "Nsight Compute"}
    return table(metrics.summary(report), columns, f"{_name(step)}, {recording.label}")


def comparison(recording: Recording | None, steps: Sequence[Step], kernel: str) -> Html:
    """One kernel's numbers in several steps, side by side."""
    reports = _reports(recording, steps)
    if not reports:
        return _words(f"Kernel {kernel}", _no_report())
    rows = [row for row in metrics.comparison(reports) if row["kernel"] == kernel]
    columns = {"what": "What", "unit": "Unit", **{name: name for name in reports}, "raw": "Nsight Compute"}
    return table(rows, columns, _caption(recording, f"Kernel {kernel}"))


def kernels(recording: Recording | None, steps: Sequence[Step]) -> Html:
    """A row a kernel: time, bytes, their rate as a share of a copy's, registers, spills and occupancy."""
    content = (recording.ladder() if recording else None) or {}
    copy = content.get("ceilings", {}).get("copy_bytes_per_s")
    reports = _reports(recording, steps)
    if not reports:
        return _words("Kernels", _no_report())
    rows = [
        row
        | {"step": name}
        | {"megabytes": _times_as_much(row["bytes"], 1e-6), "rate": _times_as_much(row["share_of_copy"], 100)}
        for name, report in reports.items()
        for row in metrics.kernels(report, copy, recording.sass(name))
    ]
    columns = {
        "step": "Step",
        "kernel": "Kernel",
        "time_us": "µs",
        "megabytes": "MB moved",
        "rate": "Rate, % of a copy's",
        "registers": "Registers",
        "spill_bytes": "Spilled bytes",
        "occupancy": "Occupancy, %",
    }
    return table(rows, columns, _caption(recording, "Kernels"))


def roofline_of(recording: Recording | None, steps: Sequence[Step]) -> AltFigure:
    """Every step below the ceilings of memory and arithmetic."""
    points, ceilings = _points(recording, steps)
    if not points:
        return _nothing("Roofline", _no_report())
    return _labelled(figures.roofline_figure(points, ceilings, recording.label), recording.label)


def floors(recording: Recording | None, steps: Sequence[Step]) -> AltFigure:
    """Every step's time beside the shortest that its bytes, operations and exponentials allow."""
    points, ceilings = _points(recording, steps)
    if not points:
        return _nothing("Time and floors", _no_report())
    return _labelled(figures.floors_figure(points, ceilings, recording.label), recording.label)


def occupancy(recording: Recording | None, steps: Sequence[Step]) -> AltFigure:
    """Occupancy reached and possible of every kernel, and what limits it."""
    return _figure(recording, steps, figures.occupancy_figure, "Occupancy")


def stalls(recording: Recording | None, steps: Sequence[Step], kernel: str) -> AltFigure:
    """What the warps of one kernel wait for, in several steps."""

    def draw(reports: Mapping[str, Report], title: str) -> AltFigure:
        return figures.stall_figure(reports, kernel, title=f"{kernel}, {title}")

    return _figure(recording, steps, draw, f"What warps of {kernel} wait for", kernel)


def sass(recording: Recording | None, before: Step, after: Step, kernel: str) -> Html:
    """One kernel's machine code in two steps side by side, as recorded; kernel may be a name such as "gate<16>"."""
    sides = {step: recording.sass(step) if recording else None for step in (before, after)}
    if None in sides.values():
        return _words(f"Machine code of {kernel} in steps {before} and {after}")
    a, b = (sass_view.choose(code, kernel, step) for step, code in sides.items())
    return sass_view.side_by_side(a, b, (f"{_name(before)}: {a.name}", f"{_name(after)}: {b.name}"))


def agreement(recording: Recording | None, steps: Sequence[Step]) -> Html:
    """Every kernel's time by four tools, and how far they are apart."""
    rows = [
        {"step": _name(step), "percent": _times_as_much(row["spread"], 100)} | row
        for step in steps
        if recording
        for row in recording.agreement(step)
    ]
    caption = _caption(recording, "One kernel's time, four ways")
    long = [row for row in rows if row["spread"] is not None and row["ncu_us"] and row["ncu_us"] >= LONG_US]
    if long:
        worst = max(long, key=lambda row: row["spread"])
        caption += f". Largest spread of kernels of {LONG_US} µs and more: {worst['spread']:.1%}, {worst['kernel']}"
        caption += f" of {worst['step']}"
    columns = {
        "step": "Step",
        "kernel": "Kernel",
        "events_us": "CUDA events, µs",
        "nsys_us": "Nsight Systems, µs",
        "torch_us": "torch.profiler, µs",
        "ncu_us": "Nsight Compute, µs",
        "percent": "Spread, % of the smallest",
    }
    return table(rows, columns, caption)


def race(recording: Recording | None, before: Step, after: Step) -> Html:
    """Two steps on every shape where both were timed: medians, and how many times as fast the later one is."""
    rows = []
    for case, times in (recording.times() if recording else {}).items():
        a, b = times.get(_number(before)), times.get(_number(after))
        if a and b:
            rows.append({"case": case, "before": a, "after": b, "ratio": a / b, "peer": times.get("flash_kda")})
    columns = {
        "case": "Shape",
        "before": f"{_name(before)}, ms",
        "after": f"{_name(after)}, ms",
        "ratio": "Times as fast",
        "peer": "FlashKDA, ms",
    }
    return table(rows, columns, _ladder_caption(recording, "Medians"))


def short_calls(recording: Recording | None) -> Html:
    """What one call from Python takes on a few tokens, on the same tensors every time: the host's time, in µs."""
    content = ((recording.ladder() if recording else None) or {}).get("short_calls")
    if content is None:
        return _words("Short calls from Python")
    rows: dict[str, dict[str, Any]] = {}
    for row in content["rows"]:
        place = rows.setdefault(row["case"], {"case": row["case"]})
        place[str(row.get("peer", row.get("step")))] = _times_as_much(row["median_ms"], 1e3)
    columns = {"case": "Shape", **{str(step): f"{_name(step)}, µs" for step in (4, 5, 6)}, "flash_kda": "FlashKDA, µs"}
    caption = f"One call from Python, medians, {recording.label_for(content['machine'])}"
    return table([dict.fromkeys(columns) | row for row in rows.values()], columns, caption)


def price_of_precise(recording: Recording | None, step: Step) -> Html:
    """A step without and with `precise`, on every shape where it was timed with it."""
    times, rows, end = recording.times() if recording else {}, [], ", precise"
    for case in times:
        plain, precise = (times.get(name, {}).get(_number(step)) for name in (case.removesuffix(end), case))
        if case.endswith(end) and plain and precise:
            rows.append({"case": case.removesuffix(end), "plain": plain, "precise": precise, "ratio": precise / plain})
    columns = {"case": "Shape", "plain": f"{_name(step)}, ms", "precise": "precise, ms", "ratio": "Times as long"}
    return table(rows, columns, _ladder_caption(recording, "Medians"))


def exponentials(recording: Recording | None) -> Html:
    """Results a clock and multiprocessor of every form of the exponential."""
    content = (recording.ladder() if recording else None) or {}
    columns = {"form": "Form", "results_per_clock_per_sm": "Results a clock and multiprocessor"}
    rows = content.get("exponential", {}).get("throughput", [])
    return table(rows, columns, _ladder_caption(recording, "One exponential, from registers"))


def exponent_errors(recording: Recording | None, x: float) -> AltFigure:
    """Errors in ulp of every form of the exponential on the recorded GPU, x marked."""
    if recording is None or recording.exp_forms() is None:
        return _nothing("Errors of the exponential on a GPU")
    forms = [form for form in expforms.forms(recording) if form.device == "GPU"]
    return plots_gpu.exponent_figure(forms, x, f"GPU: {recording.exp_forms_label}")


def gates(recording: Recording | None) -> Html:
    """The gate stage alone in every form: its time, and what its machine code asks of a multiprocessor."""
    content = (recording.ladder() if recording else None) or {}
    code = (recording.sass("exp_throughput") if recording else None) or {}
    rows = []
    for number, row in enumerate(content.get("exponential", {}).get("gate", [])):
        kernel = code.get(f"gate<{number}>")
        fits = kernel and dataflow.ctas_by_registers(kernel.registers, row["K"])
        found = {"registers": kernel and kernel.registers, "instructions": kernel and len(kernel.instructions)}
        pipes = collections.Counter(map(pipe, kernel.instructions)) if kernel else {}
        found |= {"memory": pipes.get("global"), "xu": pipes.get("xu")}
        rows.append(row | found | {"warps": fits and fits * row["K"] // 32})
    columns = {
        "form": "Form",
        "median_ms": "Median, ms",
        "instructions": "Instructions written",
        "memory": "of them loads and stores",
        "xu": "of them for the XU",
        "registers": "Registers a thread",
        "warps": "Warps a multiprocessor can hold",
    }
    return table(rows, columns, _ladder_caption(recording, "The gate stage alone"))


def errors(recording: Recording | None, steps: Sequence[Step], T: int = 256) -> AltFigure:
    """Errors of the output for every regime, at T tokens and lower_bound -5."""
    content = (recording.ladder() if recording else None) or {}
    found: dict[str, dict[str, float]] = {}
    for row in content.get("accuracy", []):
        if row.get("step") in map(_number, steps) and (row["T"], row["lower_bound"]) == (T, -5.0):
            correlation = "" if row["key_correlation"] is None else f" {row['key_correlation']}"
            found.setdefault(_name(row["step"]), {})[row["regime"] + correlation] = row["error_rms"]
    return error_by_regime_figure(found, f"output, {recording.ladder_label},") if found else _nothing("Errors on a GPU")


def identical_keys(recording: Recording | None, of: str = "output") -> Html:
    """Errors where all keys are equal, by gate and length, and what `precise` makes of them.

    of: "output" or "final state".
    """
    error = {"output": "error_rms", "final state": "state_error_rms"}[of]
    content = (recording.ladder() if recording else None) or {}
    rows: dict[tuple[float, int], dict[str, Any]] = {}
    for row in content.get("identical_keys", []):
        place = rows.setdefault((row["gate_logit"], row["T"]), {"gate_logit": row["gate_logit"], "T": row["T"]})
        place[f"{row.get('peer', row.get('step'))}{', precise' * bool(row.get('precise'))}"] = row[error]
    columns = {"gate_logit": "Gate's logit", "T": "Tokens", "5": _name(5), "6": _name(6)}
    columns |= {"6, precise": f"{_name(6)}, precise", "flash_kda": "FlashKDA"}
    by_gate = [dict.fromkeys(columns) | rows[key] for key in sorted(rows)]
    return table(by_gate, columns, _ladder_caption(recording, f"Error of the {of}, all keys equal"))


def moved(recording: Recording | None, steps: Sequence[Step]) -> dict[str, float]:
    """Measured bytes a token and head between the GPU and its memory, by step's name; not measured: not in it."""
    tokens_and_heads = math.prod(evidence.TEACHING_SHAPE[size] for size in "BTH")
    points, _ = _points(recording, steps)
    return {point.name: point.bytes / tokens_and_heads for point in points}


def registers(recording: Recording | None, kernel: str, head_size: int = 128) -> int | None:
    """Registers of a thread, as recorded, of a kernel of kda_lab.dataflow such as "5 prepare"; None: not recorded."""
    step, name = kernel.removesuffix(", split").split()
    code = (recording.sass(int(step)) if recording else None) or {}
    warpgroups = f", {1 if kernel.endswith('split') else head_size // 64}" if kernel.startswith("6 recurrence") else ""
    instance = re.compile(rf"{name}<{head_size}{warpgroups}[,>]")  # more arguments may follow, the usual choice first
    return next((code[key].registers for key in sorted(code) if instance.match(key)), None)


def memories(recording: Recording | None, H: int = 96) -> AltFigure:
    """The memories of the recorded GPU by size, beside what of a step has to go somewhere."""
    machine = recording.machine if recording else {}
    if "l2_bytes" not in machine:
        return _nothing("Memories of a GPU")
    return plots_gpu.memory_figure(machine, H)


def moved_bytes(recording: Recording | None, steps: Sequence[Step]) -> AltFigure:
    """Bytes a token and head that steps move, counted from their sources; a marker where they were measured, too."""
    counted = {_name(step): dataflow.moves(step) for step in steps}
    measured = moved(recording, steps)
    fig = plots_gpu.moved_bytes_figure(counted, measured, _caption(recording, "measured"))
    return _labelled(fig, recording.label) if measured else fig


def history(recording: Recording | None, step: Step, measured: str = "", group: str = "") -> Html:
    """What was tried on a step or "exp_throughput", a change a row: timed on what, before, after, whether it stayed.

    measured: only the changes timed on this, such as "prepare". group: only those of one idea, such as "clusters".
    """
    content = recording.history(step) if recording else None
    if content is None:
        return _words(f"What was tried on {step if step == 'exp_throughput' else f'step {step}'}")
    columns = {"kept": "Kept", "change": "What was changed", "shape": "Shape"}
    columns |= {} if measured else {"measured": "Timed"}
    rows = [
        row | {"ratio": _ratio(row)}
        for row in content["rows"]
        if measured in ("", row["measured"]) and group in ("", row.get("group"))
    ]
    times = ("before_ms", "after_ms")
    short = any(row[time] is not None and row[time] < _SHORT_MS for row in rows for time in times)
    if short:
        rows = [row | {time: _times_as_much(row[time], 1e3) for time in times} for row in rows]
    unit = "µs" if short else "ms"
    columns |= {f"{word}_ms": f"{measured} {word}".strip().capitalize() + f", {unit}" for word in ("before", "after")}
    columns["ratio"] = "Times as fast"
    return table(rows, columns, f"{content['machine']}, {content['date']}. {content['method']}")


def cycles(recording: Recording | None, step: Step) -> Html:
    """What the parts of a step's chain take in cycles, where that was read while it was written."""
    content = recording.history(step) if recording else None
    found = (content or {}).get("cycles")
    if content is None or found is None:
        return _words(f"Cycles in the chain of step {step}")
    caption = f"{content['machine']}, {content['date']}. {found['method']}"
    return table(found["rows"], {"where": "Read", "what": "What", "cycles": "Cycles"}, caption)


def _times_as_much(value: float | None, factor: float) -> float | None:
    """A number in another unit; None stays "not measured"."""
    return None if value is None else factor * value


def _ratio(row: Mapping[str, Any]) -> float | None:
    """Times as fast after a change; as noted, where only that was."""
    if row["before_ms"] is None or row["after_ms"] is None:
        return row.get("ratio")
    return row["before_ms"] / row["after_ms"]


def _figure(
    recording: Recording | None,
    steps: Sequence[Step],
    draw: Callable[[Mapping[str, Report], str], AltFigure],
    what: str,
    kernel: str = "",
) -> AltFigure:
    reports = {name: r for name, r in _reports(recording, steps).items() if not kernel or kernel in r.kernels}
    return _labelled(draw(reports, recording.label), recording.label) if reports else _nothing(what, _no_report())


def _reports(recording: Recording | None, steps: Sequence[Step]) -> dict[str, Report]:
    """By the step's name; steps without a report are left out, and all where reports cannot be read here."""
    try:
        found = {_name(step): recording.ncu(step) for step in steps} if recording else {}
    except ToolMissing:
        return {}
    return {name: report for name, report in found.items() if report is not None}


def _no_report() -> str:
    """Why there is nothing of a report: "not measured", or what reads the reports that are there."""
    try:
        ncu.reader()
    except ToolMissing:
        return f"{NOT_MEASURED}: pip install ncu-report reads what was recorded"
    return NOT_MEASURED


def _points(recording: Recording | None, steps: Sequence[Step]) -> tuple[list[roofline.Point], Mapping[str, Any]]:
    """The steps that were measured, and the ceilings of their machine; none without the ceilings."""
    content = (recording.ladder() if recording else None) or {}
    shape = {size: evidence.TEACHING_SHAPE[size] for size in "BTH"}
    flops = next((row["flops"] for row in content.get("rows", []) if shape.items() <= row.items()), None)
    if flops is None or "ceilings" not in content:
        return [], {}
    found = [roofline.point(name, report, flops) for name, report in _reports(recording, steps).items()]
    return [point for point in found if point is not None], content["ceilings"]


def _name(step: Step) -> str:
    return registry.get(step, "cuda").name


def _number(step: Step) -> int:
    return registry.get(step, "cuda").number


def _caption(recording: Recording | None, what: str) -> str:
    return f"{what}, {recording.label}" if recording else what


def _ladder_caption(recording: Recording | None, what: str) -> str:
    return f"{what}, {recording.ladder_label}" if recording else what


def _labelled(fig: AltFigure, label: str) -> AltFigure:
    """The figure, with machine and date in its words as well as in its title."""
    fig.alt = f"{fig.alt} {label[0].upper()}{label[1:]}."
    return fig


def _words(what: str, why: str = NOT_MEASURED) -> Html:
    return Html(f"<p>{what}: {why}</p>", f"{what}: {why}")


def _nothing(what: str, why: str = NOT_MEASURED) -> AltFigure:
    fig = figure(7.2, 1.0)
    fig.text(0.5, 0.5, f"{what}: {why}", ha="center", va="center", color=GREY, fontsize=12)
    fig.alt = f"{what}: {why}."
    return fig
