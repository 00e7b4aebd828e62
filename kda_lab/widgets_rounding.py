"""Lesson 5's rounding microscope: the published kernel's roundings on switches, and what each does to the error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import ipywidgets

from kda_lab import plots_gpu, reference, rounding
from kda_lab.compare import relative_rms
from kda_lab.controls import Drawn, Explorer, button, choice, wrapped
from kda_lab.inputs import Inputs, make_inputs
from kda_lab.rounding import Rounding

T, H = 64, 2  # small enough to answer while a finger is on the key

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "q̂, k̂ and scale in bf16": ("normalised", "scale"),
    "exponentials in bf16": ("exponentials", "flush"),
    "decayed keys and queries in bf16": ("k_decayed", "q_decayed", "k_inv", "k_restored"),
    "L in fp16": ("L",),
    "beta in 16 bits": ("beta",),
    "INV and Mqk in bf16": ("INV", "Mqk"),
    "U in bf16": ("U",),
    "output in bf16": ("out",),
    "state in bf16": ("state",),
}
"""A switch's name: the fields of `Rounding` that it turns."""

INVERSE = "inverse: Neumann series in fp16"

CASES: Mapping[str, dict[str, object]] = {
    "ordinary gates": {"regime": "mixed"},
    "gates that retain": {"regime": "retain"},
    "key correlation 0.5": {"regime": "collinear", "key_correlation": 0.5},
    "key correlation 0.9": {"regime": "collinear", "key_correlation": 0.9},
    "identical keys": {"regime": "collinear", "key_correlation": 1.0},
}


def rounding_microscope() -> RoundingMicroscope:
    """Errors of output and state with the roundings of your choice, run now by the rounding mirror."""
    return RoundingMicroscope()


class RoundingMicroscope(Explorer):
    """`plots_gpu.rounding_figure` of three runs: as switched, all roundings on, and none.

    Public, beside an Explorer's: `case`, the checkboxes `switches` (by name) and `inverse`, and `presets`.
    """

    def __init__(self) -> None:
        self.case = choice("inputs", tuple(CASES), "ordinary gates")
        self.switches = {name: _checkbox(name) for name in SWITCHES}
        self.inverse = _checkbox(INVERSE)
        self.presets = [
            button("all on: as published", "every rounding on", self._set_all(True)),
            button("all off", "no rounding but that of the arithmetic, fp32", self._set_all(False)),
            button("identical keys", "every rounding on, all keys of a head equal", self._fail),
            button("the same, exact inverse", "the same without the series in fp16", self._mend),
        ]
        self._figure = plots_gpu.RoundingPicture(("as switched", "all on", "all off"))
        boxes = [*self.switches.values(), self.inverse]
        super().__init__((self.case, *boxes), (wrapped(self.presets), self.case, wrapped(boxes)), height="270px")

    def draw(self) -> Drawn:
        chosen = chosen_rounding({name for name, box in self.switches.items() if box.value}, self.inverse.value)
        case = self.case.value
        errors = {
            "as switched": measure(case, chosen),
            "all on": measure(case, Rounding.published()),
            "all off": measure(case, chosen_rounding(set(), False)),
        }
        self._figure.update(errors, f"{case}, {T} tokens, {H} heads")
        on = [name for name, box in self.switches.items() if box.value] + [INVERSE] * self.inverse.value
        output, state = errors["as switched"]
        text = f"{case}: error of the output {output:.2g}, of the final state {state:.2g}."
        return Drawn(self._figure.png(), self._figure.figure.alt, f"{text}\nOn: {', '.join(on) or 'nothing'}.")

    def _set_all(self, on: bool) -> Callable[[], None]:
        def apply() -> None:
            for box in (*self.switches.values(), self.inverse):
                box.value = on

        return apply

    def _fail(self) -> None:
        self._set_all(True)()
        self.case.value = "identical keys"

    def _mend(self) -> None:
        self._fail()
        self.inverse.value = False


def chosen_rounding(on: set[str], neumann: bool) -> Rounding:
    """The published roundings, but only those of the named switches; the sigmoid is exact unless all are on."""
    changes: dict[str, object] = {field: name in on for name, fields in SWITCHES.items() for field in fields}
    return Rounding.published().replace(**changes, inverse="neumann_fp16" if neumann else "exact")


@functools.lru_cache(maxsize=256)
def measure(case: str, choice: Rounding) -> tuple[float, float]:
    """Errors of the output and of the final state of one of CASES, against float64. Deterministic, so kept."""
    inputs, truth = _case(case)
    result = rounding.forward(inputs, choice)
    return relative_rms(result.out, truth.out), relative_rms(result.final_state, truth.final_state)


@functools.lru_cache
def _case(name: str) -> tuple[Inputs, reference.Result]:
    inputs = make_inputs(T=T, H=H, **CASES[name])
    return inputs, reference.recurrent(inputs)


def _checkbox(name: str) -> ipywidgets.Checkbox:
    return ipywidgets.Checkbox(value=True, description=name, indent=False, layout={"width": "19em"})
