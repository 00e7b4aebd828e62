"""The lessons' interactive figures in JupyterLab, driven by a real browser with the keyboard."""

from __future__ import annotations

import re

import pytest
from browsing import run_all

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def lesson(browser, lab):
    """Lesson 3, where the range explorer is."""
    return run_all(browser, lab, "03_factored")


def state(page) -> tuple[str, str, str]:
    """The explorer's picture, its alt text and the text under it."""
    picture = page.locator(".widget-html img").last
    return picture.get_attribute("src"), picture.get_attribute("alt"), page.get_by_role("status").last.inner_text()


def test_every_cell_ran_without_an_error(lesson):
    page, errors = lesson
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    assert errors == []


def test_every_picture_has_an_alt_text(lesson):
    page, _ = lesson
    pictures = page.locator(".jp-OutputArea img").all()
    assert len(pictures) >= 5
    for picture in pictures:
        assert len(picture.get_attribute("alt")) > 40


def test_arrow_keys_move_the_slider_and_with_it_picture_and_text(lesson):
    page, errors = lesson
    slider = page.get_by_role("slider").first
    slider.scroll_into_view_if_needed()
    before = state(page)
    assert "lower_bound -5," in before[2]
    slider.focus()
    for _ in range(9):
        old = state(page)[0]
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("old => [...document.querySelectorAll('.widget-html img')].at(-1).src !== old", arg=old)
    after = state(page)
    assert "lower_bound -5.45," in after[1]
    assert "lower_bound -5.45," in after[2]
    assert "Silently wrong" in after[2]
    box = page.get_by_role("spinbutton").first
    assert box.input_value() == "-5.45"
    assert errors == []


def test_a_burst_of_keys_ends_at_its_last_value(lesson):
    page, errors = lesson
    page.get_by_role("slider").first.focus()
    page.keyboard.press("Home")
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    page.get_by_role("status").last.get_by_text("lower_bound -6,").wait_for(timeout=20_000)
    assert page.get_by_role("spinbutton").first.input_value() == "-6"
    assert errors == []


def test_a_preset_works_by_keyboard(lesson):
    page, errors = lesson
    page.get_by_role("button", name="+0.5: growth").focus()
    page.keyboard.press("Enter")
    page.get_by_role("status").last.get_by_text("Growth").wait_for(timeout=20_000)
    assert "lower_bound 0.5," in state(page)[1]
    assert errors == []


def test_a_typed_number_moves_the_picture(lesson):
    page, errors = lesson
    box = page.get_by_role("spinbutton").first
    box.fill("-2.5")
    box.press("Enter")
    page.get_by_role("status").last.get_by_text("lower_bound -2.5,").wait_for(timeout=20_000)
    assert errors == []


# lesson: (what has the focus, its name, the key that is pressed, what the explorer then says)
BY_KEYBOARD = {
    "02_rebased_ex2": ("button", "x = −79.5", "Enter", "x = -79.5"),
    "04_fused_one_kernel": ("button", "6 recurrence", "Enter", "6 recurrence, chunk 16, head size 128"),
    "05_fused_two_kernel": ("checkbox", "state in bf16", "Space", "On: .*output in bf16, inverse"),
    "07_reading_nsight": ("button", "recurrence", "Enter", "recurrence takes most"),
}


@pytest.mark.parametrize("name", BY_KEYBOARD)
def test_explorers_of_other_lessons_answer_to_the_keyboard(browser, lab, name):
    role, called, key, says = BY_KEYBOARD[name]
    page, errors = run_all(browser, lab, name)
    try:
        assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
        for picture in page.locator(".jp-OutputArea img").all():
            assert len(picture.get_attribute("alt")) > 40
        control = page.get_by_role(role, name=called, exact=role == "button").first
        control.scroll_into_view_if_needed()
        control.focus()
        page.keyboard.press(key)
        page.get_by_role("status").get_by_text(re.compile(says)).first.wait_for(timeout=20_000)
        answer = page.locator("details").first
        answer.locator("summary").focus()
        page.keyboard.press("Enter")
        assert answer.get_attribute("open") is not None
        assert errors == []
    finally:
        page.close()
