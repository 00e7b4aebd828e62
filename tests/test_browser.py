"""The lessons' interactive figures in JupyterLab, driven by a real browser with the keyboard."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
TOKEN = "browser-test"
FLAGS = ["--no-sandbox", "--disable-quic", "--disable-background-networking"]
# Nothing but the notebook: no news, no update check; all cells in the page, so that the test can look at every output.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}


def unavailable(reason: str) -> None:
    """Skip on a user's machine, fail in CI, where a skipped test would go unnoticed."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright is not installed: pip install 'kda-lab[test]'")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        unavailable("no Chromium: apt install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab that serves a copy of the lessons."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(NOTEBOOKS, folder / "lessons")
    for name, values in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder / 'lessons'}"]
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.port_retries=0",
        *options,
    ]
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "PYTHONPATH": str(NOTEBOOKS.parent),
    }
    with open(folder / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(f"{address}/api/status?token={TOKEN}", server, Path(log.name))
            yield address
        finally:
            server.terminate()
            server.wait(30)


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(300):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(address, timeout=5):
            return
        assert server.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.2)
    raise TimeoutError(log.read_text(encoding="utf-8"))


def run_all(browser, lab, name):
    """A lesson with all cells run, and the errors that the page has reported."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"{lab}/lab/workspaces/{name}/tree/{name}.ipynb?token={TOKEN}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=60_000)
    page.get_by_text("| Idle").wait_for(timeout=60_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    last = page.locator(".jp-CodeCell .jp-InputPrompt").last
    page.wait_for_function(
        "prompt => /\\[\\d+\\]/.test(prompt.textContent)", arg=last.element_handle(), timeout=240_000
    )
    return page, errors


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
