"""What is installed: the wheel carries the sources and works on its own, and the three lists of dependencies agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA_NAMES = {"torch": "pytorch", "playwright": "playwright-python"}


def requirements(*extras: str) -> list[Requirement]:
    listed = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return [Requirement(line) for line in listed]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_environment_yml_has_the_dependencies_of_pyproject():
    listed = re.findall(
        r"^ +- (\w[^\n:]*)$", (ROOT / "environment.yml").read_text(encoding="utf-8").split("dependencies:")[1], re.M
    )
    found = {str(Requirement(line)) for line in listed} - {"pip", "cxx-compiler"}
    expected = {f"{CONDA_NAMES.get(r.name, r.name)}{r.specifier}" for r in requirements("test")}
    assert found == expected | {f"python{PROJECT['requires-python']}"}


def test_constraints_pin_every_dependency_inside_its_range():
    pins = {canonicalize_name(pin.name): pin for pin in constraints()}
    for requirement in requirements(*PROJECT["optional-dependencies"]):
        pin = pins[canonicalize_name(requirement.name)]
        (version,) = pin.specifier
        assert version.operator == "==", pin
        assert requirement.specifier.contains(version.version), (str(pin), str(requirement))


def test_constraints_pin_exactly_and_once():
    pins = constraints()
    assert all(re.fullmatch(r"==[\w.+!]+", str(pin.specifier)) for pin in pins)
    names = [canonicalize_name(pin.name) for pin in pins]
    assert len(names) == len(set(names))
    assert "torch==2.13.0" in map(str, pins)


def test_every_distribution_that_is_installed_here_is_pinned():
    """Only where the environment came from `make`: a hand-made one may hold anything."""
    stamp = Path(sys.prefix) / ".installed"
    if not stamp.exists():
        pytest.skip("this environment was not made by `make`")
    done = subprocess.run([sys.executable, "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "==" in line]
    installed = {canonicalize_name(line.split("==")[0]): line.split("==")[1].split("+")[0] for line in lines}
    with_torch = {name for name in installed if re.match(r"nvidia-|cuda-|triton$", name)}  # a CUDA build pins its own
    assert installed.keys() - with_torch <= {canonicalize_name(pin.name) for pin in constraints()}
    here = [pin for pin in constraints() if pin.marker is None or pin.marker.evaluate()]  # an old Python has fewer
    pins = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in here}
    assert {name: version for name, version in installed.items() if name in pins}.items() <= pins.items()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_carries_package_and_sources_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "csrc", "kda_lab"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()]
    expected = {name if name.startswith("kda_lab/") else f"kda_lab/{name}" for name in files}
    assert len(expected) > 40
    assert expected <= names
    assert {name.split("/")[0] for name in names} == {"kda_lab", wheel.name.split("-py3")[0] + ".dist-info"}
    assert not [name for name in names if "__pycache__" in name or name.endswith((".so", ".o"))]


@pytest.mark.slow
def test_the_wheel_works_without_a_checkout(wheel, tmp_path):
    """Unpacked into an empty folder: it builds its library from its own sources, runs a step and names its version."""
    site = tmp_path / "site é"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    code = (
        "import kda_lab, kda_lab.native as n; from kda_lab.inputs import make_inputs;"
        "print(kda_lab.forward(make_inputs(T=20)).out.shape); print(kda_lab.__file__); print(n.csrc_dir())"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "KDA_LAB_CACHE": str(tmp_path / "cache")}
    environment.pop("KDA_LAB_CSRC", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shape, package, csrc = done.stdout.splitlines()
    assert shape == "torch.Size([1, 20, 4, 128])"
    assert Path(package).is_relative_to(site)
    assert Path(csrc) == site / "kda_lab" / "csrc"
    done = subprocess.run(
        [sys.executable, "-m", "kda_lab.cli", "lab"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.returncode == 2
    assert b"clone the repository" in done.stderr


def test_the_console_script_is_there():
    script = Path(sys.executable).parent / "kda-lab"
    assert subprocess.run([script, "steps"], capture_output=True, text=True, check=True).stdout.startswith("0  ")
