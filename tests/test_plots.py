"""Figures: their alt text states what the data says, and what was not measured is not drawn as a number."""

from __future__ import annotations

import dataclasses
import math
import types

import numpy as np
import pytest

from kda_lab import plots
from kda_lab.bench import Row
from kda_lab.numeric_range import explore


@pytest.fixture(scope="module")
def report():
    return explore(-5.0, errors=False)


def row(step: int, slug: str, ms: float | None, error: float) -> Row:
    samples = () if ms is None else (ms, ms, ms)
    return Row(step, slug, "cpu", 1, 64, 4, 128, 128, 16, None, error, samples, 1, 1, 0.1)


STEPS = [
    types.SimpleNamespace(number=n, slug=slug)
    for n, slug in enumerate(("token_by_token", "naive_exp", "rebased_ex2", "factored"))
]


def texts(fig) -> list[str]:
    return [text.get_text() for axes in fig.axes for text in axes.texts]


def every_figure(report):
    errors = {"1 naive_exp": {"forget": 1e-3, "retain": 2e-3}}
    measured = dataclasses.replace(report, native_error=1.6e-3, mirror_error=math.nan)
    triangle = np.tril(np.ones((16, 16)))
    yield plots.ladder_figure([row(0, "token_by_token", 3.0, 1e-3)], STEPS)
    yield plots.memory_figure({"forget": np.full((64, 2, 8), -2.5), "retain": np.full((64, 2, 8), -0.01)})
    yield plots.error_by_position_figure({"forget": np.geomspace(1, 1e-9, 16)}, "Error when no state is handed on")
    yield plots.chunk_matrices_figure(np.tril(triangle, -1), triangle)
    yield plots.stage_times_figure({"step 1": {"activate_gate": 1.0, "form_L_and_Mqk": 3.0}})
    yield plots.times_by_chunk_figure({"1 naive_exp": {16: 1.0, 64: 4.0}})
    yield plots.error_by_regime_figure(errors)
    yield plots.error_by_bound_figure([measured])
    yield plots.range_figure(measured)


def test_every_figure_is_opaque_and_has_an_alt_text_in_sentences(report):
    for fig in every_figure(report):
        assert fig.get_facecolor()[3] == 1.0
        assert len(fig.alt) > 40, fig.alt
        fig.canvas.draw()
        assert np.asarray(fig.canvas.buffer_rgba())[..., 3].min() == 255


def test_no_text_leaves_its_figure(report):
    for fig in every_figure(report):
        fig.canvas.draw()
        renderer = fig.canvas.get_renderer()
        for axes in fig.axes:
            box = axes.get_tightbbox(renderer)
            assert box.x0 >= -1, fig.alt
            assert box.y0 >= -1, fig.alt
            assert box.x1 <= fig.bbox.x1 + 1, fig.alt
            assert box.y1 <= fig.bbox.y1 + 1, fig.alt


def test_the_public_figures_are_the_ones_tested(report):
    public = {name for name in vars(plots) if name.endswith("_figure")}
    assert len(list(every_figure(report))) == len(public)


def test_ladder_names_the_fastest_and_leaves_gaps_where_nothing_was_measured():
    rows = [
        row(0, "token_by_token", 30.0, 1e-3),
        row(1, "naive_exp", 60.0, 2e-3),
        row(2, "rebased_ex2", None, math.nan),
    ]
    fig = plots.ladder_figure(rows, STEPS)
    assert "fastest step is 0, token_by_token, at 30 ms" in fig.alt
    assert "1, naive_exp, at 60 ms, 2 times as long" in fig.alt
    assert texts(fig).count("not measured") == 4  # steps 2 and 3, time and error
    assert "60 ms" in texts(fig)


def test_ladder_without_measurements_says_so():
    assert "no step was measured" in plots.ladder_figure([], STEPS).alt


def test_range_figure_shows_the_reports_numbers(report):
    fig = plots.range_figure(report)
    shown = texts(fig)
    assert f"2^{-5 * 16 / math.log(2):.1f}" in shown  # exp(G) after 16 tokens of a saturated gate
    assert f"2^{5 * 16 / math.log(2):.1f}" in shown
    assert shown.count("not measured") == 2
    assert report.verdict in fig.alt
    assert any(report.verdict in text for text in shown)


def test_range_figure_writes_nan_as_a_word_and_marks_what_is_outside(report):
    outside = dataclasses.replace(report, g_cumsum_min=-400.0, native_error=2e-3, mirror_error=math.nan)
    shown = texts(plots.range_figure(outside))
    assert "NaN" in shown
    assert "0.002" in shown
    assert f"←2^{-400 / math.log(2):.1f}" in shown


@pytest.mark.parametrize(("dtype", "overflow"), [("bf16", 128), ("fp16", 16)])
def test_range_figure_shades_what_the_dtype_cannot_hold(report, dtype, overflow):
    picture = plots.RangePicture()
    picture.update(dataclasses.replace(report, dtype=dtype))
    _, above = picture._zones
    assert above.get_x() == pytest.approx(overflow, rel=1e-3)
    assert f"{dtype}: overflows" in texts(picture.figure)


def test_moving_the_picture_equals_drawing_it_anew(report):
    moved, fresh = plots.RangePicture(), plots.RangePicture()
    other = dataclasses.replace(report, g_cumsum_min=-30.0, mirror_error=0.5, dtype="fp16")
    for picture, reports in ((moved, (report, other)), (fresh, (other,))):
        for each in reports:
            picture.update(each)
            png = picture.png()
    assert moved.png() == fresh.png() == png


def test_error_by_bound_says_where_it_becomes_nan(report):
    errors = {-5.0: (1e-3, 5e-3), -5.45: (1e-3, 0.1), -6.0: (1e-3, math.nan)}
    sweep = [
        dataclasses.replace(report, lower_bound=bound, native_error=native, mirror_error=mirror)
        for bound, (native, mirror) in errors.items()
    ]
    alt = plots.error_by_bound_figure(sweep).alt
    assert "bf16 factors is NaN from -6 down" in alt
    assert "bf16 factors reaches 0.1 at -5.45 while still finite" in alt
    assert "fp32 factors is NaN" not in alt


def test_memory_figure_states_what_a_chunk_leaves():
    fig = plots.memory_figure({"forget": np.full((64, 1, 4), -math.log(2))})
    assert "forget: 2^-16" in fig.alt
