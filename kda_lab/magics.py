"""Notebook magics: ``%load_ext kda_lab.magics``. Each is one call of a function that works without a notebook, too.

%%nvtx NAME              runs the cell inside a range (kda_lab.annotate.range)
%%kda_profile            runs the cell under torch.profiler and shows the timeline (profiling.torch_trace.profile)
%kda_sass 1 2            machine code of one step, or of two side by side (kda_lab.sass, profiling.sass_view)
%kda_diff 1 2            what changes in the source from one step to another (kda_lab.show.diff)
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from kda_lab import annotate, show
from kda_lab.show import Html


def load_ipython_extension(ipython: Any) -> None:
    """Called by ``%load_ext kda_lab.magics``."""
    ipython.register_magics(KdaMagics)


@magics_class
class KdaMagics(Magics):
    @cell_magic
    def nvtx(self, line: str, cell: str) -> None:
        """%%nvtx NAME: runs the cell inside a range called NAME."""
        with annotate.range(line.strip() or "cell", category="cell"):
            self.shell.run_cell(cell).raise_error()

    @cell_magic
    def kda_profile(self, line: str, cell: str) -> None:
        """%%kda_profile [--save FILE]: profiles the cell; FILE gets a trace that ui.perfetto.dev opens."""
        from kda_lab.profiling import figures, timeline, torch_trace

        parser = _Parser("%%kda_profile")
        parser.add_argument("--save")
        options = parser.parse_args(shlex.split(line))
        found = torch_trace.profile(lambda: self.shell.run_cell(cell).raise_error())
        if options.save:
            timeline.save_perfetto(found, options.save)
        show.show(figures.timeline_figure(found))

    @line_magic
    def kda_sass(self, line: str) -> Html:
        """%kda_sass STEP [OTHER] [--arch sm_90a]: the machine code of a step, or of two side by side."""
        from kda_lab.profiling import sass_view

        parser = _Parser("%kda_sass")
        parser.add_argument("step")
        parser.add_argument("other", nargs="?")
        parser.add_argument("--arch", default="sm_90a")
        options = parser.parse_args(shlex.split(line))
        return sass_view.of_steps(options.step, options.other, arch=options.arch)

    @line_magic
    def kda_diff(self, line: str) -> Html:
        """%kda_diff BEFORE AFTER [--stage NAME] [--device cpu|cuda]: what changes in the source."""
        parser = _Parser("%kda_diff")
        parser.add_argument("before")
        parser.add_argument("after")
        parser.add_argument("--stage")
        parser.add_argument("--device", choices=("cpu", "cuda"))
        options = parser.parse_args(shlex.split(line))
        return show.diff(options.before, options.after, stage=options.stage, device=options.device)


class _Parser(argparse.ArgumentParser):
    """Raises a usage error in the notebook, where argparse would end the kernel."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, add_help=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. {self.format_usage().strip()}")
