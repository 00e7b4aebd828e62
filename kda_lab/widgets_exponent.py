"""Lesson 2's explorer: one exponential in every form, its error over x and what it costs."""

from __future__ import annotations

import ipywidgets

from kda_lab import expforms, plots_gpu
from kda_lab.controls import Drawn, Explorer, button, choice, slider, wrapped
from kda_lab.profiling import recorded
from kda_lab.show import png

DEVICES = ("CPU", "GPU")


def exponent_explorer() -> ExponentExplorer:
    """Errors of the exponential's forms at an x of your choice: this CPU's measured now, a GPU's as recorded."""
    return ExponentExplorer()


class ExponentExplorer(Explorer):
    """`plots_gpu.exponent_figure` with a control for x and for the device.

    Public, beside an Explorer's: the controls `x` and `device`, and `presets`.
    """

    def __init__(self) -> None:
        self._recording = recorded.load()
        self._forms = expforms.forms(self._recording)
        self.x, x_row = slider("x", -79.5, 79.5, -1.0, 0.5)
        self.device = choice("device", DEVICES, "CPU")
        self.presets = [self._preset(x) for x in (-0.5, -5.0, -79.5)]
        super().__init__((self.x, self.device), (wrapped(self.presets), wrapped([x_row, self.device])), "390px")

    def draw(self) -> Drawn:
        x, device = self.x.value, self.device.value
        chosen = [form for form in self._forms if form.device == device]
        where = "this machine's C library, now"
        if device == "GPU":
            where = self._recording.exp_forms_label if self._recording else "not measured"
        fig = plots_gpu.exponent_figure(chosen, x, f"{device}: {where}")
        return Drawn(png(fig), fig.alt, "\n".join([f"x = {x:g}. {where}", *(form.describe(x) for form in chosen)]))

    def _preset(self, x: float) -> ipywidgets.Button:
        def apply() -> None:
            self.x.value = x

        return button(f"x = {x:g}".replace("-", "−"), f"sets x to {x:g}", apply)
