"""The lessons and the book for everybody: without sight or colours, by keyboard alone, in light and in dark."""

from __future__ import annotations

import io
import itertools
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from browsing import run_all, unavailable
from colours import VISION, contrast, distance, filtered, seen
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.container import BarContainer
from matplotlib.text import Text
from PIL import Image
from test_plots import every_figure

from kda_lab import dataflow, expforms, plots, plots_gpu, registry, show
from kda_lab.numeric_range import explore
from kda_lab.profiling import figures, recorded, views

THEMES = {"light": lambda colour: np.array(to_rgb(colour)), "dark": lambda colour: darkened(to_rgb(colour))}
READABLE, VISIBLE = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11: contrast of text, and of what else one has to see
APART = 20.0  # CIELAB; just noticeable is 2.3
EXPLORERS = ("02_rebased_ex2", "03_factored", "04_fused_one_kernel", "07_reading_nsight")


def darkened(colour) -> np.ndarray:
    return filtered(np.array(colour), show.DARK_FILTER)


@pytest.fixture(scope="module")
def all_figures() -> list[plots.AltFigure]:
    """One of every kind, those of a GPU from what was recorded on one."""
    recording, steps = recorded.load(), tuple(step.number for step in registry.steps())
    kernel = "recurrence"
    moves = {str(step): dataflow.moves(step) for step in steps}
    forms = [form for form in expforms.forms(recording) if form.device == "CPU"]
    of_recording = [
        views.memories(recording),
        views.timeline(recording, 5),
        views.roofline_of(recording, steps),
        views.floors(recording, steps),
        views.occupancy(recording, steps),
        views.stalls(recording, steps, kernel),
        views.errors(recording, steps),
    ]
    of_numbers = [
        plots_gpu.moved_bytes_figure(moves, {"1": 6000.0}),
        plots_gpu.rounding_figure({"all on": (1e-3, 1e-2), "all off": (1e-7, float("nan"))}),
        plots_gpu.exponent_figure(forms, -1.0),
    ]
    return [*every_figure(explore(-5.0, errors=False)), *of_numbers, *of_recording]


# Colours.


@pytest.mark.parametrize("theme", THEMES)
def test_every_colour_of_the_palette_can_be_seen(theme):
    paper = THEMES[theme](plots.PAPER)
    for colour in plots.PALETTE:
        assert contrast(THEMES[theme](colour), paper) >= VISIBLE, colour


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", THEMES)
def test_no_two_colours_of_the_palette_look_alike(theme, vision):
    found = {colour: seen(THEMES[theme](colour), vision) for colour in plots.PALETTE}
    for (name, a), (other, b) in itertools.combinations(found.items(), 2):
        assert distance(a, b) >= APART, (name, other)


@pytest.mark.parametrize("theme", THEMES)
def test_every_text_of_every_figure_can_be_read(theme, all_figures):
    grounds = [plots.PAPER, plots.SHADE, "#d9d9d9"]
    grounds += [over(to_rgba(colour, figures.TINT), plots.PAPER) for colour in figures._COLOURS.values()]
    inks = {text.get_color() for fig in all_figures for text in fig.findobj(Text) if text.get_text()}
    assert len(inks) >= 2
    for ink in inks:
        for ground in grounds if to_rgb(ink) != to_rgb(plots.GREY) else grounds[:1]:
            assert contrast(THEMES[theme](ink), THEMES[theme](ground)) >= READABLE, (ink, ground)


def over(colour, ground) -> tuple[float, ...]:
    """A colour with an alpha on an opaque ground."""
    *front, alpha = colour
    return tuple(alpha * a + (1 - alpha) * b for a, b in zip(front, to_rgb(ground), strict=True))


def test_series_differ_by_more_than_their_colour(all_figures):
    compared = 0
    for fig in all_figures:
        for axes in fig.axes:
            lines = [line for line in axes.lines if not line.get_label().startswith("_")]
            bars = [
                group for group in axes.containers if isinstance(group, BarContainer) and group.get_label()[0] != "_"
            ]
            looks = [line.get_marker() for line in lines]
            looks += [f"bar {group[0].get_hatch()}" for group in bars]
            assert len(set(looks)) == len(looks), (fig.alt, looks)
            compared += len(looks) > 1
    assert compared >= 8


# Words.


class Reader(HTMLParser):
    """A page as its structure: pictures, headings, tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.alts: list[str] = []
        self.levels: list[int] = []
        self.headers: list[int] = []  # header cells of each table
        self.lang = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "html":
            self.lang = found.get("lang", "")
        if tag == "img":
            self.alts.append(found.get("alt") or "")
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag == "table":
            self.headers.append(0)
        if tag == "th":
            self.headers[-1] += 1


@pytest.mark.slow
def test_every_picture_says_what_it_finds(book):
    pictures = 0
    for lesson in book.lessons:
        alts = Reader(book.page(f"notebooks/{lesson.name}")).alts
        for alt in alts:
            assert len(alt) > 40, alt
            assert alt.endswith("."), alt
            assert re.search(r"\d|not measured", alt), f"a finding has a number: {alt}"
            assert not re.match(r"(?i)(an? |the )?(figure|image|picture|plot|graph|chart)\b", alt), alt
        pictures += len(alts)
    assert pictures > 25


@pytest.mark.slow
def test_beside_every_picture_are_its_words_for_everybody(book):
    for path in book.pages:
        html = path.read_text(encoding="utf-8")
        for picture in re.finditer(r'<img class="kda-figure"[^>]*alt="([^"]*)"[^>]*>', html):
            after = unescape(html[picture.end() : picture.end() + 4000])
            unfolds = after.startswith("<details><summary") and f"<p>{unescape(picture[1])}</p></details>" in after
            assert unfolds or after.startswith('<div role="status"'), (path.name, picture[1])


@pytest.mark.slow
def test_pages_name_their_language_and_headings_and_tables_are_in_order(book):
    for path in book.pages:
        page = Reader(path.read_text(encoding="utf-8"))
        assert page.lang == "en"
        if path.name == "search.html":  # its heading is made by its script
            continue
        assert page.levels.count(1) == 1, path.name
        assert page.levels[0] == 1, path.name
        assert all(after - before <= 1 for before, after in itertools.pairwise(page.levels)), (path.name, page.levels)
        assert all(headers > 0 for headers in page.headers), path.name


# The book in a browser.


@pytest.fixture(params=["light", "dark"])
def open_page(request, browser, book):
    """Opens a page of the book for a reader whose system is light or dark."""
    context = browser.new_context(color_scheme=request.param, offline=True, viewport={"width": 1300, "height": 900})

    def open_(name: str):
        page = context.new_page()
        page.goto((book.folder / f"{name}.html").as_uri())
        return page

    open_.theme = request.param
    yield open_
    context.close()


@pytest.mark.browser
@pytest.mark.slow
def test_axe_finds_nothing_serious(open_page):
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        unavailable("axe is not installed: pip install 'kda-lab[test]'")
    for name in ("index", "search", "docs/glossary", "docs/lecturers", *(f"notebooks/{name}" for name in EXPLORERS)):
        found = Axe().run(open_page(name)).response["violations"]
        serious = [v for v in found if v["impact"] in ("serious", "critical")]
        assert not serious, [(name, v["id"], v["nodes"][0]["html"][:200]) for v in serious]


@pytest.mark.browser
@pytest.mark.slow
def test_the_keyboard_reaches_what_is_on_a_page_and_shows_where_it_is(open_page):
    page = open_page("notebooks/03_factored")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        shown = page.evaluate(
            """() => {
            const at = document.activeElement, style = getComputedStyle(at);
            const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 1;
            return [at.tagName, at.textContent.trim(), outlined] }"""
        )
        reached.append(shown[:2])
        assert shown[2] or shown[0] == "BODY", f"no outline: {shown}"
    assert ["A", "Glossary"] in reached
    assert ["SUMMARY", "In words"] in reached
    page.close()


@pytest.mark.browser
@pytest.mark.slow
def test_pictures_and_code_follow_the_readers_theme(open_page):
    page = open_page("notebooks/03_factored")
    assert theme(page) == open_page.theme
    toggle = page.locator("button.theme-toggle").last
    seen = {open_page.theme}
    for _ in range(2):  # the button goes from "as the system" through the two themes
        toggle.click()
        seen.add(theme(page))
    assert seen == {"light", "dark"}, "whatever the system says"


def theme(page) -> str:
    """ "dark" or "light" if page, code, output and figures agree on it, else what each of them is."""
    found = page.evaluate(
        """() => {
        const ground = selector => {
            const colour = getComputedStyle(document.querySelector(selector)).backgroundColor;
            const [r, g, b] = colour.match(/\\d+/g).map(Number);
            return r + g + b > 384 ? "light" : "dark" };
        const picture = document.querySelector("img.kda-figure");
        const grounds = ["body", ".cell_input", ".cell_input .highlight", ".output.stream .highlight"].map(ground);
        return [...grounds, getComputedStyle(picture).filter === "none" ? "light" : "dark"] }"""
    )
    return found[0] if len(set(found)) == 1 else str(found)


@pytest.mark.browser
@pytest.mark.slow
def test_a_browser_darkens_colours_as_computed_here(browser):
    swatches = Image.new("RGB", (10 * len(plots.PALETTE), 10))
    for i, colour in enumerate(plots.PALETTE):
        swatches.paste(colour, (10 * i, 0, 10 * i + 10, 10))
    data = io.BytesIO()
    swatches.save(data, "png")
    page = browser.new_page()
    page.set_content(f'<body data-jp-theme-light="false">{show.image(data.getvalue(), "swatches")}')
    shot = Image.open(io.BytesIO(page.locator("img").screenshot())).convert("RGB")
    for i, colour in enumerate(plots.PALETTE):
        expected = 255 * darkened(to_rgb(colour))
        assert np.abs(np.array(shot.getpixel((10 * i + 5, 5))) - expected).max() <= 2, colour
    page.close()


# JupyterLab.


@pytest.fixture(scope="module")
def lesson(book, browser, lab):  # the book first: lessons cannot run beside an open browser
    page, _ = run_all(browser, lab, "03_factored")
    yield page
    page.close()


@pytest.mark.browser
@pytest.mark.slow
def test_tab_goes_through_an_explorers_controls_and_keys_move_them(lesson):
    page = lesson
    shown = page.locator(".widget-html img").last, page.get_by_role("status").last
    before = shown[0].get_attribute("src"), shown[1].inner_text()
    page.get_by_role("button", name="−5: safe").focus()
    moved = 0  # of lower_bound, A_log, dt_bias and chunk, down; of dtype and gate, up
    while moved < 6:
        page.keyboard.press("Tab")
        kind, place, outlined = page.evaluate(FOCUSED)
        assert outlined, f"the focus is on a {kind}, and nothing shows it"
        if kind == "slider":
            page.keyboard.press("ArrowLeft" if moved < 4 else "ArrowRight")
            page.wait_for_function(f"old => ({FOCUSED})()[1] !== old", arg=place)
            moved += 1
        else:
            assert kind in ("button", "input", "div"), f"after {moved} sliders, Tab left the explorer"
    shown[1].get_by_text("lower_bound -5.05, chunks of 8, fp16, forget gate").wait_for(timeout=20_000)
    assert shown[0].get_attribute("src") != before[0]
    assert shown[1].inner_text() != before[1]


# What has the focus: its kind, where it is in its slider, and whether it is outlined.
FOCUSED = """() => {
    const at = document.activeElement, style = getComputedStyle(at);
    return [at.getAttribute("role") || at.tagName.toLowerCase(), at.parentElement.style.transform,
        style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 1] }"""


@pytest.mark.browser
@pytest.mark.slow
def test_pictures_follow_jupyterlabs_theme(lesson):
    page = lesson
    figures = page.locator("img.kda-figure")
    filters = "pictures => [...new Set(pictures.map(picture => getComputedStyle(picture).filter))]"
    assert figures.evaluate_all(filters) == ["none"]
    choose_theme(page, "JupyterLab Dark")
    assert figures.evaluate_all(filters) == [show.DARK_FILTER]
    choose_theme(page, "JupyterLab Light")
    assert figures.evaluate_all(filters) == ["none"]


def choose_theme(page, name: str) -> None:
    page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", name)
    page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)
