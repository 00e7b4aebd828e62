"""Measure everything on this GPU and write it down: ``python -m kda_lab.record --out DIR [--quick] [--only PART ...]``.

Parts, in the order they run:
    ceilings     what this GPU reaches in the same run as all else: copy bandwidth, matrix products, exponentials
    exponential  every form of the exponential on registers, and the gate stage alone in every form
    accuracy     errors against float64 by regime and length, and for identical keys, beside the published kernel's
    golden       errors on the golden cases
    ladder       every step and peer on every shape: checked, then timed, interleaved
    short_calls  what a call with 16 tokens costs the host, under its own machine, for it depends on that most
    sass         the machine code of every step
    profiles     reports of Nsight Compute, Nsight Systems and torch.profiler for every step at one shape, and each
                 kernel's time by CUDA events with no profiler attached

It writes DIR/ladder.json (also after each shape, so that a run cut short keeps what it measured) and, beside it, the
reports of `profiles` and `sass` with a machine.json (nsys/ and torch/ may hold one of their own). Put DIR at
kda_lab/data/recorded/<gpu> to ship it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from kda_lab import microbench, native, peers
from kda_lab.profiling import accuracy, evidence, ladder, machine

PARTS = ("ceilings", "exponential", "accuracy", "golden", "ladder", "short_calls", "sass", "profiles")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kda_lab.record", description="Measure the ladder on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for ladder.json and the reports")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="two shapes, 10 samples, short sequences, no FLA")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here; recorded numbers come from one (kda-lab ladder shows those that ship)")
    try:
        record(options.out, options.only, quick=options.quick)
    except FileExistsError as error:
        parser.error(str(error))
    return 0


def record(out: Path, parts: Iterable[str] = PARTS, *, quick: bool = False) -> dict[str, Any]:
    """Runs the parts, prints what it finds and returns what it wrote to out/ladder.json.

    Raises FileExistsError when only some parts were to take the place of a recording that may have all of them.
    """
    parts = set(parts)
    if (out / "ladder.json").exists() and (quick or parts != set(PARTS)):
        raise FileExistsError(
            f"{out} holds a recording, and a part of one would take its place: give --out another folder, or remove "
            f"{out / 'ladder.json'}"
        )
    out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    library = native.load("cuda")
    found, missing = peers.find()
    if quick:
        found = [peer for peer in found if peer.name != "fla"]
    recording: dict[str, Any] = {
        "machine": machine.describe(),
        "clocks_before": machine.clocks(),
        "library": library.sha256,
        "peers": {peer.name: peer.version for peer in found},
        "peers_not_measured": missing,
    }
    print(json.dumps(recording["machine"], indent=1))
    print(f"peers: {recording['peers']}, not measured: {missing}")

    def heading(part: str) -> None:
        print(f"\n== {part}, after {time.perf_counter() - begin:.0f} s", flush=True)

    for part in (part for part in PARTS if part in parts):
        heading(part)
        if part == "ceilings":
            recording["ceilings"] = evidence.ceilings()
            print(json.dumps(recording["ceilings"], indent=1))
        elif part == "exponential":
            recording["exponential"] = {"throughput": microbench.exp_throughput(), "gate": microbench.gate()}
            for row in recording["exponential"]["throughput"]:
                print(f"{row['form']:<28} {row['results_per_clock_per_sm']:.2f} results a clock and multiprocessor")
            for row in recording["exponential"]["gate"]:
                print(f"gate stage, {row['form']:<16} {row['median_ms']:.4f} ms")
        elif part == "accuracy":
            lengths = accuracy.LENGTHS[:2] if quick else accuracy.LENGTHS
            recording["accuracy"] = _collect(accuracy.by_regime(found, lengths), _accuracy_line)
            recording["identical_keys"] = _collect(accuracy.identical_keys(found, lengths[1:]), _identical_keys_line)
        elif part == "golden":
            recording["golden"] = _collect(accuracy.golden(found), _golden_line)
        elif part == "ladder":
            recording["rows"] = []
            bound = evidence.bound(recording.get("ceilings") or evidence.ceilings())
            samples = 10 if quick else 40
            for case, inputs in ladder.make_all_inputs(ladder.QUICK_CASES if quick else ladder.CASES).items():
                rows = ladder.measure(case, inputs, found, bound, library.sha256, samples)
                recording["rows"] += _collect(rows, _ladder_line)
                _write(out / "ladder.json", recording)
        elif part == "short_calls":
            bound = evidence.bound(recording.get("ceilings") or evidence.ceilings())
            recording["short_calls"] = {"machine": recording["machine"], "rows": []}
            for case, inputs in ladder.make_all_inputs(ladder.SHORT_CASES).items():
                rows = ladder.measure(case, inputs, found, bound, library.sha256)
                recording["short_calls"]["rows"] += _collect(rows, _ladder_line)
        elif part == "sass":
            major, minor = torch.cuda.get_device_capability()
            evidence.code(out, print, f"sm_{major}{minor}")
        elif part == "profiles":
            evidence.profiles(out, print)
            evidence.kernel_events(out, print)
        recording["clocks_after"] = machine.clocks()
        _write(out / "ladder.json", recording)
    _write(out / "machine.json", recording["machine"])
    heading("done")
    return recording


def _collect(rows: Iterable[dict[str, Any]], line: Any) -> list[dict[str, Any]]:
    collected = []
    for row in rows:
        collected.append(row)
        print(line(row), flush=True)
    if not collected:
        print("not measured")
    return collected


def _name(row: dict[str, Any]) -> str:
    return f"{row['step']} {row['slug']}" if "step" in row else f"{row['peer']} {row['version']}"


def _ladder_line(row: dict[str, Any]) -> str:
    if row["median_ms"] is None:
        return f"{row['case']:<44} {_name(row):<26} {row.get('refused', 'not measured')}"
    share = row["floor_ms"] / row["median_ms"]
    return (
        f"{row['case']:<44} {_name(row):<26} {row['method']:<10} {row['median_ms']:9.4f} ms  iqr {row['iqr_ms']:.4f}"
        f"  floor {share:6.1%}  error {row['error_rms']:.2e}"
    )


def _accuracy_line(row: dict[str, Any]) -> str:
    correlation = "" if row["key_correlation"] is None else f" {row['key_correlation']}"
    return (
        f"{row['regime'] + correlation:<14} lower_bound {row['lower_bound']:<5} T {row['T']:<6} {_name(row):<26}"
        f" out {row['error_rms']:.2e}  state {row['state_error_rms']:.2e}"
    )


def _identical_keys_line(row: dict[str, Any]) -> str:
    precise = ", precise" if row.get("precise") else ""
    return (
        f"identical keys, gate logit {row['gate_logit']:<6} T {row['T']:<6} {_name(row) + precise:<26}"
        f" out {row['error_rms']:.2e}  state {row['state_error_rms']:.2e}"
    )


def _golden_line(row: dict[str, Any]) -> str:
    state = row["state_error_rms"]
    return (
        f"{row['case']:<22} {_name(row):<26} out {row['error_rms']:.2e}  peer's {row['recorded_peer_error_rms']:.1e}"
        + ("" if state is None else f"  state {state:.2e}")
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    """One row a line: readable in a diff, a third of the size of an indented file."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list):
            lines = ",\n".join("  " + json.dumps(item) for item in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
