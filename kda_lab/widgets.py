"""The lessons' interactive figures: controls around a figure of kda_lab.plots."""

from __future__ import annotations

import asyncio
import time

import ipywidgets

from kda_lab.controls import Drawn, Explorer, button, choice, slider, wrapped
from kda_lab.numeric_range import DTYPES, GATES, explore
from kda_lab.plots import RangePicture

# button: (what it is called, lower_bound). All with chunk 16 in bf16 and a saturated gate, A_log and dt_bias 0.
PRESETS = (
    ("−5: safe", -5.0),
    ("−1: safer", -1.0),
    ("−5.45: silently wrong", -5.45),
    ("−6: NaN", -6.0),
    ("+0.5: growth", 0.5),
)


def range_explorer() -> RangeExplorer:
    """What lower_bound, chunk and dtype do to exp(±G), and the errors that two real runs have at this setting."""
    return RangeExplorer()


class RangeExplorer(Explorer):
    """`plots.range_figure` with a control for every argument of `numeric_range.explore`.

    Public, beside an Explorer's: the controls `lower_bound`, `A_log`, `dt_bias`, `chunk`, `dtype`, `gate` and
    `presets`.
    """

    def __init__(self) -> None:
        self.lower_bound, lower_bound_row = slider("lower_bound", -8.0, 1.0, -5.0, 0.05)
        self.A_log, a_log_row = slider("A_log", -4.0, 6.0, 0.0, 0.1)
        self.dt_bias, dt_bias_row = slider("dt_bias", -15.0, 15.0, 0.0, 0.5)
        self.chunk = choice("chunk", (8, 16, 32, 64), 16)
        self.dtype = choice("dtype", tuple(DTYPES), "bf16")
        self.gate = choice("gate", tuple(GATES), "saturated")
        self.presets = [self._preset(name, bound) for name, bound in PRESETS]
        self._figure = RangePicture()
        left = ipywidgets.VBox([lower_bound_row, a_log_row, dt_bias_row])
        right = ipywidgets.VBox([self.chunk, self.dtype, self.gate])
        super().__init__(
            (self.lower_bound, self.A_log, self.dt_bias, self.chunk, self.dtype, self.gate),
            (wrapped(self.presets), wrapped([left, right])),
        )

    def draw(self) -> Drawn:
        report = explore(
            self.lower_bound.value,
            chunk=self.chunk.value,
            dtype=self.dtype.value,
            A_log=self.A_log.value,
            dt_bias=self.dt_bias.value,
            gate=self.gate.value,
        )
        self._figure.update(report)
        return Drawn(self._figure.png(), self._figure.figure.alt, report.describe())

    def _preset(self, name: str, bound: float) -> ipywidgets.Button:
        def apply() -> None:
            self.A_log.value = self.dt_bias.value = 0.0
            self.chunk.value, self.dtype.value, self.gate.value = 16, "bf16", "saturated"
            self.lower_bound.value = bound

        return button(name, f"lower_bound {bound:g}, chunk 16, bf16, saturated gate", apply)


def measure_latency(moves: int = 40) -> tuple[float, ...]:
    """Samples in ms from a new value of the lower_bound slider to the new picture and text, in an event loop like a
    notebook kernel's. The browser's part, two messages and the decoding of a PNG, comes on top.

    Raises RuntimeError where an event loop runs already, as in a notebook.
    """
    explorer = RangeExplorer()

    async def move_and_wait() -> tuple[float, ...]:
        samples = []
        for i in range(moves):
            before, start = explorer.redraws, time.perf_counter()
            explorer.lower_bound.value = -6.5 + 6.0 * i / moves
            while explorer.redraws == before:
                await asyncio.sleep(0)
            samples.append(1e3 * (time.perf_counter() - start))
        return tuple(samples)

    return asyncio.run(move_and_wait())
