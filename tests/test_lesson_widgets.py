"""The explorers of lessons 2, 4 and 5 without a browser: what their controls do to picture, alt text and words."""

from __future__ import annotations

import json
import re

import pytest

from kda_lab import dataflow, expforms, plots_gpu, rounding
from kda_lab.native import CompilerNotFound
from kda_lab.profiling import recorded, views
from kda_lab.rounding import Rounding
from kda_lab.widgets_dataflow import DataflowExplorer
from kda_lab.widgets_exponent import ExponentExplorer
from kda_lab.widgets_rounding import CASES, SWITCHES, RoundingMicroscope, chosen_rounding, measure


def alt(explorer) -> str:
    return re.search(r'alt="([^"]*)"', explorer.picture.value)[1]


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """A GPU on which __expf is one ulp off and one of its other forms was measured, too."""
    import numpy as np

    (tmp_path / "machine.json").write_text(json.dumps({"gpu": "NVIDIA H200", "date": "2026-11-29"}))
    exact = np.exp(np.float64(expforms.X)).astype(np.float32)
    base_2 = np.exp2(np.float64(expforms.X)).astype(np.float32)
    values = {"__expf": np.nextafter(exact, np.inf).tolist(), "ex2.approx": base_2.tolist()}
    content = {"arch": "sm_90a", "instructions": {"__expf": 5}, "values": values}
    (tmp_path / "exp_forms.json").write_text(json.dumps(content))
    monkeypatch.setenv("KDA_LAB_RECORDED", str(tmp_path))
    return recorded.load()


@pytest.mark.parametrize("explorer", [DataflowExplorer, RoundingMicroscope, ExponentExplorer])
def test_picture_and_words_are_there_from_the_start(explorer):
    shown = explorer()
    assert len(alt(shown)) > 40
    assert 'role="status" aria-live="polite"' in shown.status.value
    assert shown.redraws == 1


# ---- exponent explorer


def test_errors_of_the_cpu_are_measured_and_small():
    expf, exp2f, rebased = expforms.on_cpu()
    assert max(expf.ulp) < 2
    assert max(exp2f.ulp) < 2
    # The rounding of x log2(e) is up to half an ulp of the product, which the exponential multiplies by |x|.
    assert 10 < max(rebased.ulp) < 100
    assert rebased.ulp_at(0.5) < 3


def test_errors_of_the_gpu_come_from_the_recording(recording):
    of = {form.name: form for form in expforms.forms(recording) if form.device == "GPU"}
    assert 0.5 <= max(of["__expf"].ulp) <= 1.5
    assert max(of["ex2.approx"].ulp) <= 0.5  # held against 2^x, not e^x
    assert (of["__expf"].instructions, of["expf"].instructions) == (5, None)
    assert not of["expf"].measured


def test_the_explorer_shows_the_device_that_was_chosen(recording):
    explorer = ExponentExplorer()
    assert "expf on the CPU: error" in explorer.status.value
    explorer.device.value = "GPU"
    assert "__expf on the GPU: error" in explorer.status.value
    assert "instructions for sm_90a: 5" in explorer.status.value
    assert "exp2f on the GPU: error not measured" in explorer.status.value
    assert "NVIDIA H200" in explorer.status.value
    assert "expf: not measured" in alt(explorer)


def test_x_moves_the_error(recording):
    explorer = ExponentExplorer()
    before = alt(explorer)
    next(button for button in explorer.presets if button.description == "x = −79.5").click()
    assert explorer.x.value == -79.5
    assert "x = -79.5" in alt(explorer)
    assert alt(explorer) != before


def test_without_a_recording_the_gpu_is_not_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_LAB_RECORDED", str(tmp_path))
    explorer = ExponentExplorer()
    explorer.device.value = "GPU"
    assert explorer.status.value.count("error not measured") == len(expforms.GPU_FORMS)


def test_errors_whose_file_is_gone_are_not_measured(recording):
    (recording.folder / "exp_forms.json").unlink()
    explorer = ExponentExplorer()
    explorer.device.value = "GPU"
    assert explorer.status.value.count("error not measured, cost not measured") == len(expforms.GPU_FORMS)
    assert "x = -1. not measured" in explorer.status.value
    assert "H200" not in explorer.status.value + alt(explorer)


def test_errors_carry_the_machine_and_day_they_were_measured_on(recording):
    path = recording.folder / "exp_forms.json"
    machine = {"gpu": "GPU of a test", "date": "2026-01-02"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": machine}))
    explorer = ExponentExplorer()
    explorer.device.value = "GPU"
    assert "recorded on GPU of a test, 2026-01-02" in explorer.status.value
    assert "recorded on GPU of a test, 2026-01-02" in alt(explorer)


@pytest.mark.parametrize("name", recorded.available())
def test_what_lesson_2_says_of_a_gpus_forms_holds(name):
    """As shipped: base 2 has one accuracy however it is called, and a product in front of it grows its error."""
    of = {form.name: form for form in expforms.forms(recorded.load(name)) if form.device == "GPU"}
    assert all(form.measured and form.instructions for form in of.values())
    assert of["exp2f"].ulp == of["ex2.approx"].ulp == of["ex2.approx.ftz"].ulp
    assert max(of["exp2f"].ulp) < 2
    assert of["__expf"].ulp == of["ex2.approx.ftz(x * log2e)"].ulp
    near, far = ([of["__expf"].ulp_at(x) for x in xs] for xs in ((-0.5, 0.5), (-79.5, -68.0)))
    assert max(near) < 2 < 10 < min(far)
    assert max(of["expf"].ulp) < 2


def test_every_form_is_in_the_legend(recording):
    on_gpu = [form for form in expforms.forms(recording) if form.device == "GPU"]
    texts = [text.get_text().split(":")[0].strip() for text in plots_gpu.exponent_figure(on_gpu, 0.0).legends[0].texts]
    assert texts == list(expforms.GPU_FORMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h200"])
def test_recorded_instructions_are_those_of_this_source(name):
    content = json.loads((recorded.data_dir() / name / "exp_forms.json").read_text())
    try:
        assert expforms.count_instructions(content["arch"]) == content["instructions"]
    except CompilerNotFound as error:
        pytest.skip(str(error))


# ---- data-flow explorer


def test_sizes_move_picture_and_words():
    explorer = DataflowExplorer()
    assert "at most 1 CTA on a multiprocessor, limited by registers (186 a thread)" in explorer.status.value
    explorer.head_size.value = 256
    assert "not even one CTA fits, for its registers" in explorer.status.value
    assert "head size 256" in alt(explorer)
    assert "Not compiled" in explorer.status.value
    explorer.head_size.value, explorer.chunk.value = 128, 64
    assert "limited by shared memory" in explorer.status.value


def test_presets_show_a_kernel_as_compiled():
    explorer = DataflowExplorer()
    explorer.chunk.value = 64
    next(button for button in explorer.presets if button.description == "6 recurrence").click()
    assert (explorer.kernel.value, explorer.chunk.value, explorer.head_size.value) == ("6 recurrence", 16, 128)
    assert "Compiled for" in explorer.status.value


@pytest.mark.parametrize("kernel", dataflow.kernels())
def test_the_static_twin_says_what_the_explorer_says(kernel):
    explorer = DataflowExplorer()
    explorer.kernel.value = kernel
    registers = views.registers(recorded.load(), kernel)
    pieces, fits = dataflow.on_chip(kernel), dataflow.residency(kernel, registers=registers)
    assert plots_gpu.on_chip_figure(kernel, pieces, fits, "chunk 16, head size 128").alt == alt(explorer)


def test_moved_bytes_are_drawn_with_what_was_measured():
    moves = {"4": dataflow.moves(4), "5": dataflow.moves(5)}
    fig = plots_gpu.moved_bytes_figure(moves, {"5": 2900.0})
    assert "4 1,282, 5 3,010 (measured 2,900). The least possible is 1,282." in fig.alt
    assert len(fig.axes[0].lines) == 2  # the diamond and the least
    labels = [text.get_text() for text in views.moved_bytes(recorded.load(), (4, 5)).axes[0].get_legend().get_texts()]
    assert any(re.fullmatch(r"measured, recorded on .+, \d{4}-\d\d-\d\d", label) for label in labels), labels
    assert "(measured" not in views.moved_bytes(None, (4, 5)).alt


def test_the_memories_are_named_with_their_sizes():
    machine = {"gpu": "GPU of a test", "multiprocessors": 2, "l2_bytes": 3 * 2**20, "memory_bytes": 2**30}
    found = plots_gpu.memory_figure(machine).alt
    assert "one GPU of a test" in found
    assert "registers 512 KB" in found
    assert "L2 cache 3 MB, device memory 1 GB" in found
    assert "one state 64 KB, 96 states 6 MB" in found
    assert "not measured" in views.memories(None).alt


# ---- rounding microscope


def test_every_published_rounding_is_on_a_switch():
    """All on is the published kernel, but for its fast sigmoid and fp32 sums; and each field is on one switch."""
    assert chosen_rounding(set(SWITCHES), neumann=True) == Rounding.published()
    fields = [field for names in SWITCHES.values() for field in names]
    assert sorted(fields) == sorted(name for name, on in vars(Rounding()).items() if on is True)


def test_identical_keys_fail_by_the_series_alone():
    explorer = RoundingMicroscope()
    fail, mend = explorer.presets[2:]
    fail.click()
    assert measure("identical keys", Rounding.published())[0] > 0.5
    assert f"error of the output {measure('identical keys', Rounding.published())[0]:.2g}" in explorer.status.value
    mend.click()
    assert not explorer.inverse.value
    assert measure("identical keys", Rounding.published().replace(inverse="exact"))[0] < 2e-2
    assert "error of the output 0.0" in explorer.status.value


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_reaches_the_mirror(name, monkeypatch):
    measure.cache_clear()
    explorer, seen, honest = RoundingMicroscope(), [], rounding.forward
    monkeypatch.setattr(rounding, "forward", lambda inputs, kind: seen.append(kind) or honest(inputs, kind))
    explorer.switches[name].value = False
    assert [getattr(seen[0], field) for field in SWITCHES[name]] == [False] * len(SWITCHES[name])
    assert name not in explorer.status.value
    measure.cache_clear()


def test_all_off_leaves_only_the_arithmetic():
    explorer = RoundingMicroscope()
    explorer.presets[1].click()
    assert "On: nothing." in explorer.status.value
    assert all(max(measure(case, chosen_rounding(set(), neumann=False))) < 1e-4 for case in CASES)


def test_moving_the_picture_equals_drawing_it_anew():
    names = ("as switched", "all on", "all off")
    errors = dict(zip(names, [(1e-3, 2e-3), (float("nan"), 3.0), (1e-6, 1e-7)]))
    moved, fresh = plots_gpu.RoundingPicture(names), plots_gpu.RoundingPicture(names)
    moved.update(dict.fromkeys(names, (1e-2, 0.5)), "identical keys")
    moved.png()
    moved.update(errors, "ordinary gates")
    fresh.update(errors, "ordinary gates")
    assert moved.png() == fresh.png()


@pytest.mark.gpu
def test_every_form_is_near_the_exact_value_on_this_gpu():
    values = expforms.gpu_values()
    for name in expforms.GPU_FORMS:
        assert max(expforms._errors(name, values[name])) < (100 if name in ("__expf", expforms.GPU_FORMS[-1]) else 3)


def test_a_nan_is_drawn_as_one():
    assert "gone: output nan" in plots_gpu.rounding_figure({"gone": (float("nan"), 1.0)}).alt
