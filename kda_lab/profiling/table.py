"""Tidy rows, one measured quantity each, under the column names of NVIDIA's nsight-python.

Annotation (the range a kernel ran in), Kernel, Metric, Unit, and over the launches of that kernel AvgValue, StdDev,
MinValue, MaxValue, NumRuns, CI95_Lower and CI95_Upper. A metric nobody measured has no row.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import re
import statistics
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class ReportError(ValueError):
    """A file is not a report of the expected tool, or is damaged. The text names the file and what is expected."""


def row(annotation: str, kernel: str, metric: str, unit: str, values: Sequence[float]) -> Row:
    """One row from the values of all launches. StdDev and the interval are NaN for a single launch."""
    mean, count = statistics.fmean(values), len(values)
    deviation = statistics.stdev(values) if count > 1 else math.nan
    half_width = 1.96 * deviation / math.sqrt(count)
    return {
        "Annotation": annotation,
        "Kernel": kernel,
        "Metric": metric,
        "Unit": unit,
        "AvgValue": mean,
        "StdDev": deviation,
        "MinValue": min(values),
        "MaxValue": max(values),
        "NumRuns": count,
        "CI95_Lower": mean - half_width,
        "CI95_Upper": mean + half_width,
    }


def value(rows: Sequence[Row], kernel: str, metric: str) -> float | None:
    """AvgValue of one metric of one kernel, or None when it was not measured."""
    return next((r["AvgValue"] for r in rows if r["Kernel"] == kernel and r["Metric"] == metric), None)


def instance_name(kernel: str) -> str:
    """As short_name, with the numbers among the template arguments: void kda::gate<(int)16>(...) is gate<16>."""
    arguments = re.search(rf"\b{re.escape(short_name(kernel))}<(.*?)>\(", kernel)
    numbers = re.findall(r"\d+", arguments[1]) if arguments else []
    return f"{short_name(kernel)}<{', '.join(numbers)}>" if numbers else short_name(kernel)


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The file itself, or a temporary file with what a .gz holds. Raises ReportError for a damaged .gz."""
    if path.suffix != ".gz":
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="kda_lab-") as folder:
        plain = Path(folder) / path.stem
        try:
            plain.write_bytes(gzip.decompress(path.read_bytes()))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ReportError(f"{path} is not a gzip file, or is damaged ({error})") from None
        yield plain


def text(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Rows as aligned plain text. `columns` maps a key to its heading; a missing or None value is "not measured"."""
    if not rows:
        return "not measured"
    lines = [list(columns.values())] + [[_cell(r.get(key)) for key in columns] for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def _cell(content: Any) -> str:
    if content is None:
        return "not measured"
    return f"{content:,.4g}" if isinstance(content, float) else str(content)


def short_name(kernel: str) -> str:
    """A kernel's own name, without namespaces, template arguments and parameters: kda::prepare<16>(...) is prepare."""
    text = kernel
    while (stripped := re.sub(r"<[^<>]*>|\([^()]*\)", "", text)) != text:
        text = stripped
    words = text.split("(")[0].split()
    return words[-1].split("::")[-1] if words else kernel
