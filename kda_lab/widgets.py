"""The lessons' interactive figures: controls around a figure of kda_lab.plots."""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import Callable

import ipywidgets

from kda_lab.numeric_range import DTYPES, GATES, explore
from kda_lab.plots import RangePicture
from kda_lab.show import image

# A drag sends events faster than a picture is drawn: those that arrive within this time are answered by one picture.
COALESCE_SECONDS = 0.01

_LABEL = {"description_width": "6.5em"}

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


class RangeExplorer(ipywidgets.VBox):
    """`plots.range_figure` with a control for every argument of `numeric_range.explore`.

    Public: the controls `lower_bound`, `A_log`, `dt_bias`, `chunk`, `dtype`, `gate` and `presets`, the HTML widgets
    `picture` and `status`, and `redraws`, the number of pictures drawn so far.
    """

    def __init__(self) -> None:
        self.lower_bound, lower_bound_row = _slider("lower_bound", -8.0, 1.0, -5.0, 0.05)
        self.A_log, a_log_row = _slider("A_log", -4.0, 6.0, 0.0, 0.1)
        self.dt_bias, dt_bias_row = _slider("dt_bias", -15.0, 15.0, 0.0, 0.5)
        self.chunk = ipywidgets.SelectionSlider(
            options=(8, 16, 32, 64), value=16, description="chunk", style=_LABEL, layout={"width": "22em"}
        )
        self.dtype = ipywidgets.Dropdown(options=tuple(DTYPES), value="bf16", description="dtype", style=_LABEL)
        self.gate = ipywidgets.Dropdown(options=tuple(GATES), value="saturated", description="gate", style=_LABEL)
        self.presets = [self._preset(name, bound) for name, bound in PRESETS]
        self.picture = ipywidgets.HTML(layout={"min_height": "310px"})
        self.status = ipywidgets.HTML()
        self.redraws = 0
        self._figure = RangePicture()
        self._redraw_soon = _Coalesced(self.redraw)
        for control in (self.lower_bound, self.A_log, self.dt_bias, self.chunk, self.dtype, self.gate):
            control.observe(lambda _: self._redraw_soon(), names="value")
        left = ipywidgets.VBox([lower_bound_row, a_log_row, dt_bias_row])
        right = ipywidgets.VBox([self.chunk, self.dtype, self.gate])
        super().__init__(
            [
                ipywidgets.HBox(self.presets, layout={"flex_flow": "row wrap"}),
                ipywidgets.HBox([left, right], layout={"flex_flow": "row wrap"}),
                self.picture,
                self.status,
            ]
        )
        self.redraw()

    def redraw(self) -> None:
        """Measure at the controls' present values, and show picture and text."""
        try:
            report = explore(
                self.lower_bound.value,
                chunk=self.chunk.value,
                dtype=self.dtype.value,
                A_log=self.A_log.value,
                dt_bias=self.dt_bias.value,
                gate=self.gate.value,
            )
            self._figure.update(report)
        except Exception as error:  # a callback's exception would vanish into the kernel's log
            self.status.value = _live_text(f"{type(error).__name__}: {error}")
            raise
        self.picture.value = image(self._figure.png(), self._figure.figure.alt)
        self.status.value = _live_text(report.describe())
        self.redraws += 1

    def _preset(self, name: str, bound: float) -> ipywidgets.Button:
        button = ipywidgets.Button(description=name, layout={"width": "auto"})
        button.tooltip = f"lower_bound {bound:g}, chunk 16, bf16, saturated gate"

        def apply(_: ipywidgets.Button) -> None:
            self.A_log.value = self.dt_bias.value = 0.0
            self.chunk.value, self.dtype.value, self.gate.value = 16, "bf16", "saturated"
            self.lower_bound.value = bound

        button.on_click(apply)
        return button


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


class _Coalesced:
    """Runs `work` once for all the calls of the last COALESCE_SECONDS; at once where no event loop runs."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._pending = False

    def __call__(self) -> None:
        if self._pending:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._work()
            return
        self._pending = True
        loop.call_later(COALESCE_SECONDS, self._run)

    def _run(self) -> None:
        self._pending = False
        self._work()


def _slider(
    name: str, low: float, high: float, value: float, step: float
) -> tuple[ipywidgets.FloatSlider, ipywidgets.HBox]:
    """A slider and a number box that hold one value between them."""
    slider = ipywidgets.FloatSlider(value, min=low, max=high, step=step, description=name, readout=False, style=_LABEL)
    box = ipywidgets.BoundedFloatText(value, min=low, max=high, step=step, layout={"width": "6em"})
    slider.tooltip, box.tooltip = f"{name}: arrow keys move it by {step:g}", f"{name} as a number, {low:g} to {high:g}"
    # Rounded, because a slider counts in steps and would show -5.449999999999999.
    ipywidgets.link((slider, "value"), (box, "value"), transform=(lambda v: round(v, 3), lambda v: v))
    return slider, ipywidgets.HBox([slider, box])


def _live_text(text: str) -> str:
    """Text that a screen reader speaks when it changes."""
    return (
        f'<div role="status" aria-live="polite" style="line-height:1.4; white-space:pre-line">{html.escape(text)}</div>'
    )
