"""What the lessons' interactive figures are built from: controls that redraw one picture and say its finding."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ipywidgets

from kda_lab.show import image

# A drag sends events faster than a picture is drawn: those that arrive within this time are answered by one picture.
COALESCE_SECONDS = 0.01

# ipywidgets does not show on which slider or number the focus is, and insists; and it cuts a slider's longer words off.
_STYLE = (
    "<style>.kda-explorer.jupyter-widgets :is(:focus-visible, input:focus-visible) "
    "{ outline: 2px solid var(--jp-brand-color1, #1976d2) !important; "
    "outline-offset: 2px; } .kda-explorer .widget-readout { flex: none; width: auto; max-width: none; }</style>"
)

LABEL = {"description_width": "6.5em"}


class Drawn(NamedTuple):
    png: bytes
    alt: str  # the finding, for those who do not see the picture
    text: str  # what stands below it


class Explorer(ipywidgets.VBox):
    """Rows of controls above a picture and its finding as text, which a screen reader speaks when it changes.

    A subclass draws in `draw`, from the present values of its controls; any of `controls` changing draws again.
    Public: the HTML widgets `picture` and `status`, and `redraws`, the number of pictures drawn so far.
    """

    def __init__(
        self, controls: Sequence[ipywidgets.Widget], rows: Sequence[ipywidgets.Widget], height: str = "310px"
    ) -> None:
        self.picture = ipywidgets.HTML(layout={"min_height": height})
        self.status = ipywidgets.HTML()
        self.redraws = 0
        redraw_soon = _Coalesced(self.redraw)
        for control in controls:
            control.observe(lambda _: redraw_soon(), names="value")
        super().__init__([*rows, self.picture, self.status])
        self.add_class("kda-explorer")
        self.redraw()

    def draw(self) -> Drawn:
        """The picture at the controls' present values."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw at the controls' present values, and show picture and text."""
        try:
            drawn = self.draw()
        except Exception as error:  # a callback's exception would vanish into the kernel's log
            self.status.value = live_text(f"{type(error).__name__}: {error}")
            raise
        self.picture.value = _STYLE + image(drawn.png, drawn.alt)
        self.status.value = live_text(drawn.text)
        self.redraws += 1


def wrapped(children: Sequence[ipywidgets.Widget]) -> ipywidgets.HBox:
    """Widgets in a row that continues on the next line where the page is narrow."""
    return ipywidgets.HBox(children, layout={"flex_flow": "row wrap"})


def button(name: str, tooltip: str, act: Callable[[], None]) -> ipywidgets.Button:
    """A button that sets controls."""
    widget = ipywidgets.Button(description=name, tooltip=tooltip, layout={"width": "auto"})
    widget.on_click(lambda _: act())
    return widget


def choice(name: str, options: Sequence[object], value: object) -> ipywidgets.SelectionSlider:
    """One of several values, in order. Not a list to drop down: JupyterLab keeps a list's arrow keys to itself."""
    return ipywidgets.SelectionSlider(
        options=options, value=value, description=name, style=LABEL, layout={"width": "26em"}
    )


def slider(
    name: str, low: float, high: float, value: float, step: float
) -> tuple[ipywidgets.FloatSlider, ipywidgets.HBox]:
    """A slider and a number box that hold one value between them, and the row with both."""
    slider = ipywidgets.FloatSlider(value, min=low, max=high, step=step, description=name, readout=False, style=LABEL)
    box = ipywidgets.BoundedFloatText(value, min=low, max=high, step=step, layout={"width": "6em"})
    slider.tooltip, box.tooltip = f"{name}: arrow keys move it by {step:g}", f"{name} as a number, {low:g} to {high:g}"
    # Rounded, because a slider counts in steps and would show -5.449999999999999.
    ipywidgets.link((slider, "value"), (box, "value"), transform=(lambda v: round(v, 3), lambda v: v))
    return slider, ipywidgets.HBox([slider, box])


def live_text(text: str) -> str:
    """Text that a screen reader speaks when it changes."""
    return (
        f'<div role="status" aria-live="polite" style="line-height:1.4; white-space:pre-line">{html.escape(text)}</div>'
    )


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
