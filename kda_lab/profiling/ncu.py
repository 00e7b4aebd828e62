"""Reads Nsight Compute reports (.ncu-rep, also gzipped) with NVIDIA's ncu_report: one record for each launch."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kda_lab.profiling import table, tools
from kda_lab.profiling.table import ReportError, Row, unpacked


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of one kernel and everything Nsight Compute measured of it."""

    kernel: str  # its own name, such as "prepare"
    full_name: str  # as in the report, with namespaces and parameters
    ranges: tuple[str, ...]  # the NVTX ranges of domain kda_lab around it, outermost first
    metrics: dict[str, float | str]  # by Nsight Compute's names
    units: dict[str, str]

    def metric(self, name: str) -> float | None:
        """The number measured under this name, or None when it was not measured."""
        found = self.metrics.get(name)
        return None if found is None or isinstance(found, str) else found


@dataclasses.dataclass(frozen=True)
class Report:
    path: Path
    launches: tuple[Launch, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels in the order of their first launch."""
        return tuple(dict.fromkeys(launch.kernel for launch in self.launches))

    def values(self, kernel: str, metric: str) -> list[float]:
        """The metric's numbers over all launches of a kernel; empty when it was not measured."""
        found = (launch.metric(metric) for launch in self.launches if launch.kernel == kernel)
        return [number for number in found if number is not None]

    def rows(self, metrics: Sequence[str] | None = None) -> list[Row]:
        """Tidy rows (see kda_lab.profiling.table) of some metrics, or of every number in the report."""
        result = []
        for kernel in self.kernels:
            first = next(launch for launch in self.launches if launch.kernel == kernel)
            names = (
                metrics if metrics is not None else [name for name in first.metrics if first.metric(name) is not None]
            )
            annotation = "/".join(first.ranges[:1])
            for name in names:
                if values := self.values(kernel, name):
                    result.append(table.row(annotation, kernel, name, first.units.get(name, ""), values))
        return result


def read(path: Path | str) -> Report:
    """Reads a report. Raises FileNotFoundError, ReportError for a damaged, foreign or empty file, or
    tools.ToolMissing where ncu_report is not installed."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    module = reader()
    if path.stat().st_size == 0:
        raise ReportError(f"{path} is empty; expected a Nsight Compute report (.ncu-rep)")
    with unpacked(path) as plain:  # ncu_report reads on from the file for as long as it is asked
        try:
            context = module.load_report(str(plain))
        except Exception as error:  # its own types, by version
            raise ReportError(f"{path} is not a Nsight Compute report, or is damaged ({error})") from None
        launches = [_launch(action) for actions in _indexed(context) for action in _indexed(actions)]
    if not launches:
        raise ReportError(f"{path} holds no kernel launch: it was recorded while none ran, or it is damaged")
    return Report(path, tuple(launches))


def _launch(action: Any) -> Launch:
    metrics: dict[str, float | str] = {}
    units: dict[str, str] = {}
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        if metric is None or not metric.has_value():
            continue
        value = metric.value()
        if isinstance(value, (int, float, str)):
            metrics[name], units[name] = value, metric.unit()
    full_name = action.name(action.NameBase_DEMANGLED)
    return Launch(table.short_name(full_name), full_name, _ranges(action), metrics, units)


def _ranges(action: Any) -> tuple[str, ...]:
    state = action.nvtx_state()
    if state is None:
        return ()
    domains = [state.domain_by_id(index) for index in state.domains()]
    names = (domain.push_pop_ranges() for domain in domains if domain.name() == "kda_lab")
    return tuple(name for ranges in names for name in ranges)


def _indexed(container: Any) -> list[Any]:
    """Elements of an IContext (ranges) or IRange (actions)."""
    return [container[index] for index in range(len(container))]


@functools.cache
def reader() -> ModuleType:
    """The module ncu_report from PyPI.

    The one inside an installed Nsight Compute is left alone: under another version of Python it ends the process.
    """
    try:
        return importlib.import_module("ncu_report")
    except ImportError:
        raise tools.ToolMissing(
            "Reading Nsight Compute reports needs the package ncu-report. Install it (Linux only): pip install "
            "ncu-report."
        ) from None
