"""The range explorer without a browser: what its controls do to picture and text."""

from __future__ import annotations

import asyncio
import re

import pytest

from kda_lab import controls, numeric_range, widgets


@pytest.fixture
def explorer():
    return widgets.RangeExplorer()


def alt(explorer) -> str:
    return re.search(r'alt="([^"]*)"', explorer.picture.value)[1]


def test_a_slider_changes_picture_alt_text_and_status(explorer):
    before = explorer.picture.value, explorer.status.value
    explorer.lower_bound.value = -2.0
    assert explorer.picture.value != before[0]
    assert explorer.status.value != before[1]
    assert "lower_bound -2" in alt(explorer)
    assert "lower_bound -2" in explorer.status.value


def test_the_status_is_a_live_region(explorer):
    assert 'role="status" aria-live="polite"' in explorer.status.value


def test_sliders_and_number_boxes_hold_one_value(explorer):
    for slider in (explorer.lower_bound, explorer.A_log, explorer.dt_bias):
        box = next(row.children[1] for row in rows(explorer) if row.children[0] is slider)
        slider.value = slider.min
        assert box.value == slider.min
        box.value = slider.max
        assert slider.value == slider.max


def test_number_boxes_show_round_numbers(explorer):
    explorer.lower_bound.value = -5.449999999999999
    assert rows(explorer)[0].children[1].value == -5.45


def rows(explorer):
    left, _ = explorer.children[1].children
    return left.children


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("−5: safe", "In range"),
        ("−1: safer", "In range"),
        ("−5.45: silently wrong", "Silently wrong"),
        ("−6: NaN", "NaN"),
        ("+0.5: growth", "Growth"),
    ],
)
def test_presets_do_what_they_are_called(explorer, name, finding):
    explorer.chunk.value, explorer.A_log.value, explorer.gate.value = 64, 2.0, "forget"
    next(button for button in explorer.presets if button.description == name).click()
    assert (explorer.chunk.value, explorer.A_log.value, explorer.gate.value) == (16, 0.0, "saturated")
    assert finding in explorer.status.value


@pytest.mark.parametrize(("control", "value"), [("chunk", 64), ("dtype", "fp16"), ("gate", "retain"), ("A_log", 2.0)])
def test_every_control_reaches_the_report(explorer, control, value, monkeypatch):
    seen = []
    monkeypatch.setattr(widgets, "explore", lambda *a, **k: seen.append(k) or numeric_range.explore(*a, **k))
    getattr(explorer, control).value = value
    assert seen[-1][control] == value


def test_errors_come_from_running_the_library(explorer, monkeypatch):
    """Where the compiled step answers with something else, the explorer shows another error."""
    from kda_lab import ops

    honest = ops.forward
    monkeypatch.setattr(ops, "forward", lambda *a, **k: (r := honest(*a, **k))._replace(out=2 * r.out))
    before = explorer.status.value
    explorer.redraw()
    assert explorer.status.value != before
    assert "compiled fp32 step 1.0e+00" in explorer.status.value


def test_a_burst_of_events_is_one_picture(explorer):
    async def drag() -> int:
        before = explorer.redraws
        for i in range(50):
            explorer.lower_bound.value = -1.0 - 0.05 * i
        await asyncio.sleep(20 * controls.COALESCE_SECONDS)
        return explorer.redraws - before

    assert asyncio.run(drag()) == 1
    assert f"lower_bound {explorer.lower_bound.value:g}" in explorer.status.value


def test_an_error_is_shown_where_the_reader_looks(explorer, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("no such <gate>")

    monkeypatch.setattr(widgets, "explore", fail)
    with pytest.raises(ValueError, match="no such"):
        explorer.redraw()
    assert "ValueError: no such &lt;gate&gt;" in explorer.status.value


def test_measure_latency_times_every_move():
    samples = widgets.measure_latency(moves=3)
    assert len(samples) == 3
    assert min(samples) >= 1e3 * controls.COALESCE_SECONDS * 0.9
