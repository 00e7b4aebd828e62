"""The command `kda-lab`: a thin shell around the package's functions.

A user's mistake is one line on stderr and exit status 2; a red result is exit status 1.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Commands import what they need themselves: most of it brings torch along, and `kda-lab --help` should be instant.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: sys.argv) and returns its exit status: 0 good, 1 red, 2 a mistake."""
    if argv is None:
        _be_a_program()
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and args.run is not _lab:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.unknown = unknown
    try:
        status = args.run(args)
        sys.stdout.flush()  # here, where a closed pipe is expected
        return status
    except BrokenPipeError:  # `kda-lab diff 1 2 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if not _is_mistake(error):
            raise
        print(f"kda-lab: {error}", file=sys.stderr)
        return 2


def _be_a_program() -> None:
    """Settles what only concerns a process of its own."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show "×" shows "?"
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))  # so that children are ended first


def _is_mistake(error: Exception) -> bool:
    """Whether an error is the user's to mend and says how, so that no traceback is needed."""
    from kda_lab import native
    from kda_lab.profiling.tools import ProfilingError

    mistakes = (ValueError, NotImplementedError, OSError, MemoryError)
    if isinstance(error, (*mistakes, native.BuildError, native.LibraryError, ProfilingError)):
        return True
    return isinstance(error, RuntimeError) and "allocate" in str(error)  # torch's, of sizes too large for this machine


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kda-lab", description="How a GPU kernel gets fast: Kimi Delta Attention forward."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        return sub

    for name, afresh, what in (
        ("tour", True, "build, run every lesson, make the book of them and print the ladder"),
        ("book", False, "the same, but run only lessons whose results may have changed"),
    ):
        tour = command(name, _tour, what)
        tour.set_defaults(afresh=afresh)
        tour.add_argument("--output", type=Path, default=Path("build/book"), metavar="DIR", help="default: %(default)s")
        tour.add_argument("lessons", nargs="*", help="numbers or names of lessons; default: all")

    command("lab", _lab, "open the lessons in JupyterLab; options it does not know are passed on to jupyter lab")

    build = command("build", _build, "compile the library, or find it compiled, and print its path")
    build.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")

    command("steps", _steps, "list the steps of the ladder")

    ladder = command("ladder", _ladder, "check every step against the float64 definition, then time it")
    ladder.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    for name, what in (("B", "batch rows"), ("T", "tokens"), ("H", "heads")):
        ladder.add_argument(f"-{name}", type=_positive, help=what)
    ladder.add_argument("--step", action="append", help="number or name of a step, may be repeated; default: all")
    ladder.add_argument("--json", action="store_true", help="rows with raw samples, bound and machine as JSON")

    explore = command("explore", _explore, "what a lower_bound does to the range and the error of the decay factors")
    explore.add_argument("--lower-bound", type=float, default=-5.0, help="default: %(default)s")
    explore.add_argument("--chunk", type=int, choices=(8, 16, 32, 64), default=16, help="default: %(default)s")
    explore.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: %(default)s")
    explore.add_argument("--A-log", type=float, default=0.0, help="default: %(default)s")
    explore.add_argument("--dt-bias", type=float, default=0.0, help="default: %(default)s")
    explore.add_argument("--gate", default="saturated", help="distribution of the gate's logits; default: %(default)s")
    explore.add_argument("--save", type=Path, metavar="FILE", help="draw the picture into FILE (.png, .svg, .pdf)")

    claims = command("claims", _claims, "measure and judge the published claims about this kernel")
    claims.add_argument("numbers", nargs="*", type=int, help="numbers of claims; default: all, in about a minute")
    claims.add_argument("--json", action="store_true", help="verdicts, numbers and machine as JSON")

    grade = command("grade", _grade, "check the exercises of submitted notebooks and print their scores")
    grade.add_argument("path", type=Path, metavar="NOTEBOOK_OR_DIR", help="a notebook, or a folder of submissions")
    form = grade.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="every exercise of every submission as JSON")
    form.add_argument("--csv", action="store_true", help="the same as CSV")
    grade.add_argument(
        "--seconds", type=_positive, default=120, help="that a submission may take; default: %(default)s"
    )
    grade.add_argument("--megabytes", type=_positive, default=2048, help="that it may allocate; default: %(default)s")

    profile = command("profile", _profile, "run a step under a profiler and print what it found")
    profile.add_argument("--step", required=True, help="number or name of a step")
    profile.add_argument("--tool", choices=("ncu", "nsys", "torch"), default="torch", help="default: %(default)s")
    profile.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    for name, default in (("B", 1), ("T", 8192), ("H", 96)):
        profile.add_argument(f"-{name}", type=_positive, default=default, help="default: %(default)s")
    profile.add_argument("--out", type=Path, default=Path("build/profile"), metavar="DIR", help="default: %(default)s")

    sass = command("sass", _sass, "compile a step and print its machine code")
    sass.add_argument("step", help="number or name of a step, or exp_throughput")
    sass.add_argument("--arch", default="sm_90a", help="default: %(default)s")

    doctor = command("doctor", _doctor, "say what works on this machine, and how to mend what does not")
    doctor.add_argument("--json", action="store_true", help="the facts as JSON")

    diff = command("diff", _diff, "show what changes in the source from one step to another")
    diff.add_argument("before", help="number or name of a step")
    diff.add_argument("after", help="number or name of a step")
    diff.add_argument("--device", choices=("cpu", "cuda"), help="default: cpu, or cuda where a step is on no CPU")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _tour(args: argparse.Namespace) -> int:
    from kda_lab import tour

    return tour.run(args.output, args.lessons, args.afresh)


def _lab(args: argparse.Namespace) -> int:
    from kda_lab import tour

    # From the project's folder, so that the lessons' links to sources and glossary work, and the sources can be edited.
    folder = tour.notebooks_dir()
    start = f"--LabApp.default_url=/lab/tree/{folder.name}/00_start_here.ipynb"
    as_root = ["--allow-root"] if os.name == "posix" and os.geteuid() == 0 else []  # as in containers
    sys.stdout.flush()
    command = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder.parent}", start, *as_root, *args.unknown]
    os.execv(sys.executable, command)


def _build(args: argparse.Namespace) -> int:
    from kda_lab import native

    print(native.build(args.device))
    return 0


def _steps(args: argparse.Namespace) -> int:
    from kda_lab import registry

    for step in registry.steps():
        print(f"{step.number}  {step.slug:<18} {', '.join(step.devices):<10} {step.title}: {step.idea}")
    return 0


def _ladder(args: argparse.Namespace) -> int:
    from kda_lab import bench, registry
    from kda_lab.profiling import recorded

    def progress(text: str) -> None:
        print(f"  {text} …", file=sys.stderr, flush=True)

    device = args.device or bench.default_device()
    for step in args.step or ():
        registry.get(step, device)  # a wrong one is named before anything is measured, and so is a damaged recording
    beside = recorded.ladder_of_a_gpu() if args.device is None and device == "cpu" and not args.json else ""
    progress("matrix product and copy, for the bound")
    bound = bench.measure_bound(device)
    rows = bench.ladder(device, B=args.B, T=args.T, H=args.H, steps=args.step, bound=bound, progress=progress)
    if args.json:
        record = {"machine": bench.machine(device), "bound": vars(bound), "rows": [row.as_dict() for row in rows]}
        print(json.dumps(record, indent=2))
    else:
        print(bench.format_table(rows))
        if beside:
            print(f"\n{beside}")
    return 1 if any(row.refused for row in rows) else 0


def _explore(args: argparse.Namespace) -> int:
    from kda_lab import numeric_range

    report = numeric_range.explore(
        args.lower_bound,
        chunk=args.chunk,
        dtype=args.dtype,
        A_log=args.A_log,
        dt_bias=args.dt_bias,
        gate=args.gate,
    )
    print(report.describe())
    if args.save:
        from kda_lab import plots

        plots.range_figure(report).savefig(args.save)
        print(f"picture: {args.save}")
    return 0


def _claims(args: argparse.Namespace) -> int:
    from kda_lab import claims

    def progress(text: str) -> None:
        print(f"  {text} …", file=sys.stderr, flush=True)

    findings = claims.ledger(args.numbers or None, progress)
    print(json.dumps(claims.export(findings), indent=2) if args.json else claims.format_table(findings))
    return 0


def _grade(args: argparse.Namespace) -> int:
    from kda_lab import grade

    def progress(text: str) -> None:
        print(f"  {text} …", file=sys.stderr, flush=True)

    submissions = grade.grade(args.path, seconds=args.seconds, megabytes=args.megabytes, progress=progress)
    form = grade.as_json if args.json else grade.as_csv if args.csv else grade.format_table
    print(form(submissions).rstrip())
    return 1 if all(submission.failure for submission in submissions) else 0  # nothing could be graded


def _profile(args: argparse.Namespace) -> int:
    from kda_lab import bench
    from kda_lab.profiling import command

    device = args.device or bench.default_device()
    print(command.run(args.step, args.tool, args.out, device=device, B=args.B, T=args.T, H=args.H))
    return 0


def _sass(args: argparse.Namespace) -> int:
    from kda_lab import sass

    print(sass.listing(sass.compile_step(args.step, args.arch)))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from kda_lab import doctor

    found = doctor.facts()
    print(json.dumps([vars(fact) for fact in found], indent=2) if args.json else doctor.report(found))
    return 0 if doctor.healthy(found) else 1


def _diff(args: argparse.Namespace) -> int:
    from kda_lab import show

    colours = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"} if sys.stdout.isatty() else {}
    for line in show.text_diff(args.before, args.after, args.device):
        print(f"{colours[line[0]]}{line}\033[0m" if line[:1] in colours else line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
