"""Ranges reach NVTX and torch.profiler under one name, nested step > forward > stage, and cost nothing otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from pathlib import Path

import pytest
import torch

import kda_lab
from kda_lab import annotate, native

REPOSITORY = Path(__file__).resolve().parents[1]
STAGES = ["activate_gate", "accumulate_gate", "apply_decay", "form_L_and_Mqk", "invert_unit_lower"]


@pytest.fixture
def quiet(monkeypatch):
    """Nobody listens, whatever the environment of the tests."""
    monkeypatch.setattr(annotate, "_enabled", False)


@pytest.fixture
def inputs():
    return kda_lab.make_inputs(1, 20, 2, 16, 16)


@pytest.fixture(scope="module")
def listener(tmp_path_factory) -> Path:
    """A library that NVTX takes for Nsight: it writes down every range."""
    library = tmp_path_factory.mktemp("listener") / "listener.so"
    source = REPOSITORY / "tests" / "nvtx_listener.cpp"
    subprocess.run([native.find_cxx().path, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


def nvtx_log(listener: Path, tmp_path: Path, code: str, **variables: str) -> list[list[str]]:
    log = tmp_path / "log"
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(listener), "NVTX_LISTENER_LOG": str(log), **variables}
    environment["PYTHONPATH"] = str(REPOSITORY)
    subprocess.run(
        [sys.executable, "-c", f"import kda_lab\nfrom kda_lab import annotate\n{code}"], env=environment, check=True
    )
    return [line.split(" ") for line in log.read_text().splitlines()] if log.exists() else []


def nested(log: list[list[str]]) -> list[str]:
    """Every range as the path of the ranges around it."""
    paths, stack = [], []
    for event, *fields in log:
        if event == "push":
            stack.append(fields[2])
            paths.append(" > ".join(stack))
        elif event == "pop":
            stack.pop()
    assert not stack, "a range was left open"
    return paths


def test_nvtx_ranges_nest_step_forward_stage(listener, tmp_path):
    log = nvtx_log(listener, tmp_path, "kda_lab.forward(kda_lab.make_inputs(1, 20, 2, 16, 16), 3)")
    assert {fields[0] for _, *fields in log} == {"kda_lab"}
    paths = nested(log)
    assert paths[:2] == ["3_factored", "3_factored > 3_factored/forward"]
    assert all(path.startswith("3_factored > 3_factored/forward > ") for path in paths[2:])
    leaves = [path.rpartition(" > ")[2] for path in paths]
    assert [leaf for leaf in leaves if leaf in STAGES] == STAGES

    categories = {number: name for event, _, number, name in (line for line in log if line[0] == "category")}
    pushed = {fields[2]: categories[fields[1]] for event, *fields in log if event == "push"}
    assert pushed["3_factored"] == "step"
    assert pushed["3_factored/forward"] == "forward"
    assert {pushed[stage] for stage in STAGES} == {"stage"}


def test_nvtx_payload(listener, tmp_path):
    code = "with annotate.range('number', payload=5), annotate.range('record', payload={'T': 4, 'H': 2}): pass"
    pushes = [line for line in nvtx_log(listener, tmp_path, code) if line[0] == "push"]
    payload_types = {name: int(kind) for *_, name, kind in pushes}
    assert payload_types["number"] == 2  # NVTX_PAYLOAD_TYPE_INT64
    assert payload_types["record"] not in (0, 2)


def test_nvtx_range_is_closed_after_an_error(listener, tmp_path):
    code = """
try:
    with annotate.range("outer"), annotate.range("inner"):
        raise KeyError
except KeyError:
    pass
with annotate.range("after"):
    pass
"""
    assert nested(nvtx_log(listener, tmp_path, code)) == ["outer", "outer > inner", "after"]


def test_nothing_is_pushed_when_switched_off(listener, tmp_path):
    code = "annotate.enable(False)\nkda_lab.forward(kda_lab.make_inputs(1, 20, 2, 16, 16))"
    assert nvtx_log(listener, tmp_path, code) == []


def profiled_names(call) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.name for event in profile.events()]


def test_torch_profiler_sees_step_forward_and_stages(inputs, quiet):
    names = profiled_names(lambda: kda_lab.forward(inputs, 3))
    for name in ("3_factored", "3_factored/forward", *STAGES):
        assert names.count(name) == 1, name


def test_torch_profiler_nests_the_ranges(inputs, quiet):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kda_lab.forward(inputs, 3)
    (stage,) = [event for event in profile.events() if event.name == "form_L_and_Mqk"]
    parents = []
    while stage.cpu_parent:
        stage = stage.cpu_parent
        parents.append(stage.name)
    assert parents.index("3_factored/forward") < parents.index("3_factored")


def test_ranges_work_without_nvtx(inputs, quiet, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr(annotate, "_enabled", True)
    annotate._nvtx_domain.cache_clear()
    try:
        assert "3_factored/forward" in profiled_names(lambda: kda_lab.forward(inputs, 3))
    finally:
        annotate._nvtx_domain.cache_clear()


def test_library_gets_no_callbacks_while_nobody_listens(quiet):
    assert annotate.stage_callbacks() == (None, None)
    annotate.enable()
    assert all(annotate.stage_callbacks())


@pytest.mark.parametrize("name", ["KDA_LAB_PROFILE", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"])
def test_environment_switches_it_on(name):
    assert annotate._asked_for({name: "1"})
    assert not annotate._asked_for({name: ""})
    assert not annotate._asked_for({"KDA_LAB_PROFILE": "0", "PATH": "/bin"})


def test_cost_with_nobody_listening(quiet):
    """What a forward pass pays: below 1 µs."""
    seconds = min(timeit.repeat(annotate.active, number=1000, repeat=50)) / 1000
    assert seconds < 1e-6, f"annotate.active() takes {seconds * 1e9:.0f} ns"

    def step():
        with annotate.range("name", payload=None):
            pass

    seconds = min(timeit.repeat(step, number=1000, repeat=50)) / 1000
    assert seconds < 1.5e-6, f"an idle range takes {seconds * 1e9:.0f} ns"
