"""The measurements that ship with the package: one folder a GPU, read by the same code that reads live reports.

    recording = recorded.load()            # None where nothing is recorded
    recording.label                        # "recorded on NVIDIA H200, 2026-11-29"
    recording.ladder()["rows"], recording.ncu("5"), recording.nsys("5"), recording.sass("5")

A file that is not there is None, and is shown as "not measured". KDA_LAB_RECORDED names a folder to use instead, such
as the one that ``python -m kda_lab.record --out DIR`` wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from kda_lab import registry
from kda_lab.profiling import metrics, ncu, nsys, table, torch_trace
from kda_lab.profiling.collect import SUFFIXES
from kda_lab.profiling.ladder import METHODS
from kda_lab.profiling.ncu import Report
from kda_lab.profiling.table import ReportError
from kda_lab.profiling.timeline import Timeline
from kda_lab.profiling.tools import ToolMissing
from kda_lab.sass import Kernel

SHORT_T = 1024  # tokens below which one call is over before the host has started the next

# What is read from each file without asking whether it is there: keys of the file, and of every row of its lists.
_KEYS: dict[str, tuple[str, ...]] = {
    "claims.json": ("claims",),
    "history.json": ("machine", "date", "method", "rows"),
}
_ROW_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "ladder.json": {
        "rows": ("case", "method", "median_ms", "step or peer"),
        "accuracy": ("T", "regime", "lower_bound", "key_correlation", "error_rms"),
        "identical_keys": ("T", "gate_logit", "error_rms", "state_error_rms"),
    },
    "claims.json": {"claims": ("number", "numbers", "sources")},
    "history.json": {"rows": ("kept", "change", "shape", "measured", "before_ms", "after_ms")},
}


@dataclasses.dataclass(frozen=True)
class Recording:
    """Everything measured on one machine."""

    folder: Path

    @property
    def machine(self) -> dict[str, Any]:
        """What describes the machine (see kda_lab.profiling.machine); empty where machine.json is missing."""
        return self._json("machine.json") or {}

    def machine_of(self, tool: str) -> dict[str, Any]:
        """The machine of the timelines of "nsys" or "torch": its own where they were not recorded with the rest."""
        return self._json(f"{tool}/machine.json") or self.machine

    @property
    def label(self) -> str:
        """What a number of a report must be shown with."""
        return self.label_for(self.machine)

    def label_of(self, tool: str) -> str:
        """The same for the timelines of "nsys" or "torch"."""
        return self.label_for(self.machine_of(tool))

    @property
    def ladder_label(self) -> str:
        """What a number of ladder.json must be shown with: it may be of another day than the reports."""
        return self.label_for((self.ladder() or {}).get("machine") or self.machine)

    @property
    def exp_forms_label(self) -> str:
        """What a number of exp_forms.json must be shown with; "not measured" where there is none."""
        content = self.exp_forms()
        return "not measured" if content is None else self.label_for(content.get("machine") or self.machine)

    def label_for(self, machine: dict[str, Any]) -> str:
        """What a number measured on this machine must be shown with."""
        return f"recorded on {machine.get('gpu', self.folder.name)}, {machine.get('date', 'date unknown')}"

    def ladder(self) -> dict[str, Any] | None:
        """What kda_lab.record measured: machine, ceilings, rows (times), accuracy and golden."""
        return self._json("ladder.json")

    def times(self) -> dict[str, dict[int | str, float]]:
        """Median ms by shape and by step's number or peer's name, by CUDA events around a call; small shapes first.

        Of short calls, in a CUDA graph: else it would be the host's time.
        """
        times: dict[str, dict[int | str, float]] = {}
        for row in sorted((self.ladder() or {}).get("rows", []), key=_size):
            short = row.get("T", SHORT_T) < SHORT_T
            if row["method"] == ("cuda_graph" if short else "events") and row["median_ms"] is not None:
                case = f"{row['case']}, in a CUDA graph" if short else row["case"]
                times.setdefault(case, {})[row["step"] if "step" in row else row["peer"]] = row["median_ms"]
        return times

    def claims(self) -> dict[str, Any] | None:
        """What ``kda-lab claims --json`` wrote there."""
        return self._json("claims.json")

    def ncu(self, step: int | str) -> Report | None:
        """Nsight Compute's report of a step."""
        path = self._report("ncu", step)
        return ncu.read(path) if path.exists() else None

    def nsys(self, step: int | str) -> Timeline | None:
        """Nsight Systems' timeline of a step."""
        path = self._report("nsys", step)
        return nsys.read(path) if path.exists() else None

    def torch(self, step: int | str) -> Timeline | None:
        """torch.profiler's timeline of a step."""
        path = self._report("torch", step)
        return torch_trace.read(path) if path.exists() else None

    def events(self, step: int | str) -> dict[str, float] | None:
        """Microseconds of each kernel by CUDA events, with no profiler attached."""
        return self._json(f"events/{_name(step)}.json")

    def sass(self, step: int | str, arch: str = "") -> dict[str, Kernel] | None:
        """The machine code and resources of a step's kernels, or of "exp_throughput"'s.

        arch: "sm_75" and the like for another architecture than the recorded GPU's.
        """
        name = step if step == "exp_throughput" else _name(step)
        path = self.folder / "sass" / f"{name}{arch and '.'}{arch}.json.gz"
        if not path.exists():
            return None
        try:
            content = json.loads(gzip.decompress(path.read_bytes()))
            return {
                name: Kernel(**{**kernel, "instructions": tuple(kernel["instructions"])})
                for name, kernel in content.items()
            }
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ReportError(f"{path} is damaged: {error}") from None
        except (AttributeError, KeyError, TypeError) as error:
            raise ReportError(f"{path} holds no kernels as kda_lab.sass.Kernel has them: {error!r}") from None

    def exp_forms(self) -> dict[str, Any] | None:
        """What kda_lab.expforms recorded: machine, instructions and values of the exponential's forms."""
        return self._json("exp_forms.json")

    def history(self, step: int | str) -> dict[str, Any] | None:
        """What was tried on a step or on "exp_throughput": machine, date, method, rows of a change with times in ms."""
        name = step if step == "exp_throughput" else f"step{registry.get(step, 'cuda').number}"
        return self._json(f"{name}_history.json")

    def agreement(self, step: int | str) -> list[dict[str, Any]]:
        """Each kernel's time in µs by CUDA events, Nsight Systems, torch.profiler and Nsight Compute, and their spread.

        spread is (largest - smallest) / smallest of those that were measured; None with fewer than two. Where
        Nsight Compute's reports cannot be read, its times are not among them, nor those that a tool recorded apart.
        """
        events = self.events(step) or {}
        try:
            report = self.ncu(step)
        except ToolMissing:
            report = None
        measured: dict[str, dict[str, float]] = {"events": dict(events)}
        for tool in ("nsys", "torch"):
            timeline = getattr(self, tool)(step) if self.machine_of(tool) == self.machine else None
            measured[tool] = {row["Kernel"]: row["AvgValue"] for row in timeline.rows()} if timeline else {}
        by_ncu = metrics.kernels(report) if report else []
        measured["ncu"] = {row["kernel"]: row["time_us"] for row in by_ncu if row["time_us"] is not None}
        rows = []
        for kernel in dict.fromkeys(kernel for times in measured.values() for kernel in times):
            times = {f"{tool}_us": by_kernel.get(kernel) for tool, by_kernel in measured.items()}
            known = [time for time in times.values() if time is not None]
            spread = (max(known) - min(known)) / min(known) if len(known) > 1 else None
            rows.append({"kernel": kernel, **times, "spread": spread})
        return rows

    def _report(self, tool: str, step: int | str) -> Path:
        return self.folder / tool / (_name(step) + SUFFIXES[tool].removesuffix(".gz") + ".gz")

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ReportError(f"{path} is damaged: {error}") from None
        missing = _missing(content, "history.json" if name.endswith("_history.json") else name)
        if missing:
            raise ReportError(
                f"{path} has no {missing}, which `python -m kda_lab.record --out DIR` writes: record it again, or "
                "remove the file to have it shown as not measured"
            )
        return content


def _missing(content: Any, kind: str) -> str:
    """The first thing that a file of this kind lacks, in words; "" where it is whole."""
    if not isinstance(content, dict):
        return "object at the top"
    for key in _KEYS.get(kind, ()):
        if key not in content:
            return f"{key!r}"
    for part, keys in _ROW_KEYS.get(kind, {}).items():
        rows = content.get(part, [])
        if not isinstance(rows, list):
            return f"list {part!r}"
        for index, row in enumerate(rows):
            for key in keys:
                if not isinstance(row, dict) or not any(name in row for name in key.split(" or ")):
                    return f"{key!r} in {part}[{index}]"
    return ""


def _size(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows of the ladder are sorted by: one sequence before several; the bare shape before those with more."""
    sizes = (len(row.get("seq_lens") or ()), row.get("B", 1), row.get("T", 0), row.get("H", 0))
    return *sizes, row.get("precise", False), row.get("state") or ""


def ladder_text(recording: Recording, *, all_shapes: bool = True) -> str:
    """The recorded times as plain text, a block a shape, under the label of their machine; or "not measured".

    all_shapes: False leaves the one shape that every step was timed on.
    """
    content = recording.ladder()
    if not content or not content.get("rows"):
        return f"{recording.ladder_label}: not measured"
    blocks = [f"{recording.ladder_label}, commit {content.get('machine', {}).get('commit', 'unknown')}"]
    columns = {"who": "", "median_ms": "median ms", "iqr_ms": "iqr ms", "share": "of bound", "error_rms": "error"}
    every_step = {row["case"] for row in content["rows"] if row.get("step") == 0}
    for case, method in dict.fromkeys((row["case"], row["method"]) for row in content["rows"]):
        if not (all_shapes or case in every_step):
            continue
        rows = [
            row
            | {
                "who": " ".join(str(row[key]) for key in ("step", "slug", "peer", "version") if key in row),
                "share": _share(row),
            }
            for row in content["rows"]
            if (row["case"], row["method"]) == (case, method)
        ]
        blocks.append(f"{case} ({METHODS.get(method, method)})\n{table.text(rows, columns)}")
    return "\n\n".join(blocks)


def ladder_of_a_gpu() -> str:
    """What to print under the ladder of a machine without a GPU: the recorded one, or nothing where none ships."""
    recording = load()
    return f"No GPU here: {ladder_text(recording, all_shapes=False)}" if recording else ""


def _share(row: dict[str, Any]) -> str | None:
    """How much of a row's time its floor is; None where one of them was not measured."""
    floor_ms, median_ms = row.get("floor_ms"), row["median_ms"]
    return f"{floor_ms / median_ms:.1%}" if floor_ms and median_ms else None


def data_dir() -> Path:
    """Where recordings ship: kda_lab/data/recorded."""
    return Path(__file__).resolve().parents[1] / "data" / "recorded"


def available() -> list[str]:
    """Names of the recordings that ship, such as "h200"."""
    return sorted(path.parent.name for path in data_dir().glob("*/machine.json"))


def load(name: str | Path | None = None) -> Recording | None:
    """A recording by the name of its GPU or by its folder; the first that ships, or KDA_LAB_RECORDED's, for None.

    Raises ValueError for a name or folder that is not there.
    """
    name = name or os.environ.get("KDA_LAB_RECORDED")
    if name is None:
        names = available()
        return Recording(data_dir() / names[0]) if names else None
    for folder in (data_dir() / name, Path(name)):
        if folder.is_dir():
            return Recording(folder)
    raise ValueError(
        f"no recording {str(name)!r}; expected a folder, or one of: {', '.join(available()) or 'none ship'}"
    )


@functools.lru_cache
def _name(step: int | str) -> str:
    return registry.get(step, "cuda").name
