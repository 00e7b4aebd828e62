"""`make` and its environment, on a stand-in project: the real Makefile and script, a package that installs in a second.

The stand-in builds itself, so that nothing here needs the network.
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "kda-lab"
version = "1"
"""
# A PEP 517 backend that installs the folder it lies in, or fails where there is a file named `broken`.
BACKEND = """
import os, pathlib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    if pathlib.Path("broken").exists():
        raise SystemExit("the install was cut short")
    info = "kda_lab-1.dist-info"
    files = {
        "kda_lab.pth": os.getcwd(),
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: kda-lab\\nVersion: 1\\n"
                            "Provides-Extra: test\\nProvides-Extra: cuda\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(pathlib.Path(folder, "kda_lab-1-py3-none-any.whl"), "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return "kda_lab-1-py3-none-any.whl"

build_wheel = build_editable
"""


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {
        name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "EXTRAS"}
    }
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def project(folder: Path) -> Path:
    (folder / "kda_lab").mkdir(parents=True)
    (folder / "kda_lab" / "__init__.py").touch()
    (folder / "constraints.txt").touch()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copytree(ROOT / "tools", folder / "tools")
    return folder


def works(folder: Path) -> bool:
    command = [folder / ".venv/bin/python", "-I", "-c", "import kda_lab; print(kda_lab.__file__)"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode == 0 and Path(done.stdout.strip()).is_relative_to(folder)


def test_plain_make_lists_the_targets():
    done = make(ROOT)
    assert done.returncode == 0
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    assert set(listed) >= {"tour", "test", "lab", "book", "build", "bench", "lint", "format", "clean"}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock")
def test_two_at_once_make_one_environment(tmp_path):
    folder = project(tmp_path / "project")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: make(folder, "env"), range(2)))
    assert [run.returncode for run in done] == [0, 0], done
    assert sorted("Making .venv" in run.stdout for run in done) == [False, True]
    assert works(folder)


@pytest.mark.slow
def test_the_environment_is_made_once_and_mended_when_it_broke(tmp_path):
    """One story, because making an environment takes seconds: the states a folder can be in, one after another."""
    folder = project(tmp_path / "a path with spaces, é and ß")

    (folder / "broken").touch()
    done = make(folder, "env")
    assert done.returncode != 0
    assert "the install was cut short" in done.stdout + done.stderr
    assert "run the same command again" in done.stderr
    (folder / "broken").unlink()

    done = make(folder, "env")
    assert "Making .venv" in done.stdout, "an install that failed starts over"
    assert works(folder)

    done = make(folder, "env")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "nothing to do, nothing said"

    os.utime(folder / "pyproject.toml", (2**31, 2**31))
    done = make(folder, "env")
    assert "up to date" in done.stdout, "new dependencies are installed into what is there"
    os.utime(folder / "pyproject.toml", (0, 0))

    done = make(folder, "env", "EXTRAS=test,cuda")
    assert "up to date" in done.stdout, "other extras are installed too"
    assert make(folder, "env", "EXTRAS=test,cuda").stdout == ""

    (folder / ".venv/bin/python").unlink()
    done = make(folder, "env", "EXTRAS=test,cuda")
    assert "Making .venv" in done.stdout, "a Python that is gone"
    assert works(folder)

    moved = folder.rename(tmp_path / "moved")
    done = make(moved, "env", "EXTRAS=test,cuda")
    assert "Making .venv" in done.stdout, "a moved checkout would import the old place"
    assert works(moved)


def python_that(folder: Path, body: str) -> str:
    """A stand-in for an unsuitable Python."""
    path = folder / "python-stand-in"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return f"PYTHON={path}"


def test_a_python_that_is_too_old_is_named_with_the_fix(tmp_path):
    folder = project(tmp_path / "p")
    old = python_that(tmp_path, 'case "$*" in *--version*) echo Python 3.8.18;; *) exit 1;; esac')
    done = make(folder, "env", old)
    assert done.returncode != 0
    assert "needs Python 3.10 or newer" in done.stderr
    assert "is Python 3.8.18" in done.stderr
    assert "PYTHON=python3.12" in done.stderr
    assert not (folder / ".venv").exists()


def test_no_python_at_all_is_said(tmp_path):
    done = make(project(tmp_path / "p"), "env", "PYTHON=python3.nosuch")
    assert done.returncode != 0
    assert "There is no 'python3.nosuch'" in done.stderr


def test_a_python_without_venv_is_named_with_the_fix(tmp_path):
    folder = project(tmp_path / "p")
    bare = python_that(tmp_path, f'case "$*" in *ensurepip*) exit 1;; *) exec "{sys.executable}" "$@";; esac')
    done = make(folder, "env", bare)
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr


def test_clean_leaves_sources_and_environment(tmp_path):
    folder = project(tmp_path / "p q")
    for made in ("build/book", "kda_lab/__pycache__", ".pytest_cache", ".venv/lib/__pycache__"):
        (folder / made).mkdir(parents=True)
    assert make(folder, "clean").returncode == 0
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert not left & {"build", "kda_lab/__pycache__", ".pytest_cache"}
    assert left >= {"kda_lab/__init__.py", "Makefile", ".venv/lib/__pycache__"}
