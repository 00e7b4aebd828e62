"""Lesson 4's explorer: what of a chunk lives where on the chip, and how many CTAs that leaves room for."""

from __future__ import annotations

from collections.abc import Callable

from kda_lab import dataflow, plots_gpu
from kda_lab.controls import Drawn, Explorer, button, choice, wrapped
from kda_lab.profiling import recorded, views
from kda_lab.show import png

CHUNKS, HEAD_SIZES = (16, 32, 48, 64), (64, 128, 192, 256)
COMPILED = "Compiled for chunk 16 and head sizes 64 and 128."
HYPOTHETICAL = "Not compiled: what the same layout would need. The kernels run chunk 16 and head sizes 64 and 128."


def dataflow_explorer() -> DataflowExplorer:
    """What one CTA of a fused kernel holds in registers and shared memory, for a chunk and head size of your choice."""
    return DataflowExplorer()


class DataflowExplorer(Explorer):
    """`plots_gpu.on_chip_figure` with a control for the kernel and both sizes.

    Public, beside an Explorer's: the controls `kernel`, `chunk` and `head_size`, and `presets`.
    """

    def __init__(self) -> None:
        self.kernel = choice("kernel", dataflow.kernels(), "4 fused")
        self.chunk, self.head_size = choice("chunk", CHUNKS, 16), choice("head size", HEAD_SIZES, 128)
        self.presets = [button(name, f"chunk 16, head size 128: kernel {name}", self._show(name)) for name in PRESETS]
        controls = (self.kernel, self.chunk, self.head_size)
        super().__init__(controls, (wrapped(self.presets), wrapped(controls)), "340px")

    def draw(self) -> Drawn:
        return draw(self.kernel.value, self.chunk.value, self.head_size.value)

    def _show(self, kernel: str) -> Callable[[], None]:
        def apply() -> None:
            self.chunk.value, self.head_size.value, self.kernel.value = 16, 128, kernel

        return apply


PRESETS = ("4 fused", "5 prepare", "5 recurrence", "6 recurrence")


def draw(kernel: str, chunk: int, head_size: int) -> Drawn:
    compiled = chunk == 16 and head_size in (64, 128)
    registers = views.registers(recorded.load(), kernel, head_size) if compiled else None
    pieces, fits = dataflow.on_chip(kernel, chunk, head_size), dataflow.residency(kernel, chunk, head_size, registers)
    fig = plots_gpu.on_chip_figure(kernel, pieces, fits, f"chunk {chunk}, head size {head_size}")
    lines = [f"{kernel}, chunk {chunk}, head size {head_size}: {plots_gpu.describe_residency(fits)}."]
    for place in dataflow.PLACES:
        held = ", ".join(f"{p.name} {p.bytes / 1024:,.4g} KB" for p in pieces if p.where == place)
        lines.append(f"In {place}: {held}.")
    line = f"{fits.threads} threads; these pieces take {fits.registers_per_thread} registers of a thread"
    lines.append(f"{line}." if registers is None else f"{line}, and all there is to hold takes {registers}.")
    lines.append(COMPILED if compiled else HYPOTHETICAL)
    return Drawn(png(fig), fig.alt, "\n".join(lines))
