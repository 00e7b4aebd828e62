"""Writes the ladder into README.md, between its two markers.

python tools/readme_table.py                  measure on this machine, then write
python tools/readme_table.py ladder.json      write what `kda-lab ladder --json` printed earlier
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kda_lab import registry

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- ladder: written by tools/readme_table.py -->", "<!-- end of ladder -->"
_DEVICE = {"cpu": "CPU", "cuda": "CUDA"}


def names() -> list[list[str]]:
    """The columns that do not depend on a measurement: number, slug (linked to its source), idea, devices."""
    rows = []
    for step in registry.steps():
        device = step.devices[0]
        path = step.source[device].relative_to(step.source[device].parents[3]).as_posix()
        devices = ", ".join(_DEVICE[name] for name in step.devices)
        rows.append([str(step.number), f"[`{step.slug}`]({path})", step.idea, devices])
    return rows


def render(record: dict[str, Any]) -> str:
    """The table and the label that says where and when it was measured."""
    measured = {row["step"]: row for row in record["rows"]}
    lines = [
        "| Step | Name | The one idea | Runs on | Error | Time, ms | × faster |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    before = None
    for cells in names():
        row = measured.get(int(cells[0]))
        if row is None or row["median_ms"] is None:
            lines.append(f"| {' | '.join(cells)} | not measured | not measured | |")
            continue
        faster = f"{before['median_ms'] / row['median_ms']:.1f}" if before else ""
        lines.append(f"| {' | '.join(cells)} | {row['error_rms']:.1e} | {row['median_ms']:.1f} | {faster} |")
        before = row
    row, machine = record["rows"][0], record["machine"]
    place = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    shape = ", ".join(f"{name} {row[name]}" for name in "BTHKV")
    label = (
        f"Measured on {place}, {machine['date']}, commit {machine['commit']}: {shape}; medians. Error: relative RMS of "
        "the output against the definition in float64, nearly all of it the rounding of the output to bf16. "
        "`kda-lab ladder` measures yours."
    )
    return "\n".join([*lines, "", textwrap.fill(label, 120)])


def rewrite(readme: str, table: str) -> str:
    """README's text with the table between the markers replaced."""
    head, rest = readme.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", help="output of kda-lab ladder --json")
    args = parser.parse_args(argv)
    if args.record:
        text = args.record.read_text(encoding="utf-8")
    else:
        command = [sys.executable, "-m", "kda_lab.cli", "ladder", "--device", "cpu", "--json"]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    readme = README.read_text(encoding="utf-8")
    README.write_text(rewrite(readme, render(json.loads(text))), encoding="utf-8")


if __name__ == "__main__":
    main()
