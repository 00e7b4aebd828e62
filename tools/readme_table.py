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
from kda_lab.profiling import recorded

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- ladder: written by tools/readme_table.py -->", "<!-- end of ladder -->"
_DEVICE = {"cpu": "CPU", "cuda": "CUDA"}


def names() -> list[list[str]]:
    """The columns that do not depend on a measurement: number, slug (linked to its source), idea, devices."""
    rows = []
    for step in registry.steps():
        device = step.devices[0]
        source = step.sources[device][0]
        path = source.relative_to(source.parents[3]).as_posix()
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
    return "\n".join([*lines, "", textwrap.fill(label, 120), "", *recorded_tables()])


def recorded_tables() -> list[str]:
    """Lines of a table for each recorded GPU: every step and peer, on the case that times all of them."""
    return [line for name in recorded.available() for line in _recorded_table(recorded.load(name))]


def _recorded_table(recording: recorded.Recording) -> list[str]:
    rows = [row for row in recording.ladder()["rows"] if row["method"] == "events"]
    case = next(row["case"] for row in rows if row.get("step") == 0)
    rows = [row for row in rows if row["case"] == case]
    published = next((row["median_ms"] for row in rows if row.get("peer") == "flash_kda"), None)
    lines = [
        "| On a GPU | Error | Time, ms | × faster | × FlashKDA | Share of the floor |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    before = None
    for row in rows:
        name = f"step {row['step']}, `{row['slug']}`" if "step" in row else f"{row['peer']} {row['version']}"
        faster = f"{before / row['median_ms']:.1f}" if before and "step" in row else ""
        before = row["median_ms"] if "step" in row else None
        against = f"{published / row['median_ms']:.2f}" if published else "not measured"
        share = f"{row['floor_ms'] / row['median_ms']:.0%}"
        lines.append(f"| {name} | {row['error_rms']:.1e} | {row['median_ms']:.2f} | {faster} | {against} | {share} |")
    machine = recording.ladder()["machine"]
    place = recording.ladder_label
    label = (
        f"{place[0].upper()}{place[1:]}, driver {machine['driver']}, CUDA {machine['cuda']}, "
        f"torch {machine['torch']}, commit {machine['commit']}: {case}, K = V = 128, bf16; medians of one run, "
        "versions in turn, clocks left alone. Floor: reading the inputs and writing the output once, at the copy "
        "bandwidth measured in the same run. × FlashKDA: how many times as fast as it."
    )
    return [*lines, "", textwrap.fill(label, 120), "", *_shapes_table(recording)]


def _shapes_table(recording: recorded.Recording) -> list[str]:
    """The last steps beside the published kernel on every shape with fp32 states that keeps a GPU busy."""
    busy = {row["case"] for row in recording.ladder()["rows"] if row["state"] == "fp32" and row["T"] >= 8192}
    lines = ["| The same run, fp32 states | Step 5, ms | Step 6, ms | FlashKDA, ms | Step 6 × FlashKDA |"]
    lines.append("|---|--:|--:|--:|--:|")
    for case, times in recording.times().items():
        if case not in busy:
            continue
        name = case.replace(", fp32 state", "")
        step_5 = f"{times[5]:.2f}" if 5 in times else "cannot"
        published = times.get("flash_kda")
        against = f"{published:.2f} | {published / times[6]:.2f}" if published else "not measured | not measured"
        lines.append(f"| {name} | {step_5} | {times[6]:.2f} | {against} |")
    return [*lines, "", textwrap.fill(_short_calls(recording), 120)]


def _short_calls(recording: recorded.Recording) -> str:
    """What a call costs the host, in words."""
    short = (recording.ladder() or {}).get("short_calls")
    if short is None:
        return "A short call from Python: not measured."
    took = {row.get("step", row.get("peer")): row for row in short["rows"] if row["state"] == "fp32"}
    machine = short["machine"]
    names = {5: "step 5", 6: "step 6", "flash_kda": "FlashKDA"}
    times = ", ".join(
        f"{name} {1e3 * took[key]['median_ms']:.1f} µs" if key in took else f"{name} not measured"
        for key, name in names.items()
    )
    return (
        f"A call from Python with {took[5]['case']}: {times}. Medians on the same tensors, {machine['gpu']}, "
        f"{machine['date']}; such a call is the host's time, and hosts differ."
    )


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
