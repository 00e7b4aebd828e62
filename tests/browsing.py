"""A real browser, and a JupyterLab to look at with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

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


@contextlib.contextmanager
def chromium():
    """A browser without a window."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright is not installed: pip install 'kda-lab[test]'")
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        unavailable("no Chromium: apt install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield running
        running.close()


@contextlib.contextmanager
def jupyterlab(folder: Path):
    """The address of a JupyterLab that serves a copy of the lessons and keeps all its files in `folder`."""
    shutil.copytree(NOTEBOOKS, folder / "lessons")
    for name, values in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--port={port}", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder / 'lessons'}"]
    options.append("--LabApp.expose_app_in_browser=True")  # as jupyterapp, for its commands
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
