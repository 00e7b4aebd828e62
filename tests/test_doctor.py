"""The doctor: green where things work, red with a fix where they do not, and never a traceback."""

from __future__ import annotations

import pytest

from kda_lab import doctor, native
from kda_lab.profiling import tools


def fact(name: str) -> doctor.Fact:
    return next(fact for fact in doctor.facts() if fact.name == name)


def test_everything_a_walkthrough_needs_is_green_here():
    red = [found for found in doctor.facts() if found.ok is False]
    assert red == []


def test_every_fact_that_is_red_has_a_fix(monkeypatch):
    def missing(*args):
        raise native.CompilerNotFound("a C++ compiler was not found.\nInstall it with:\n    sudo apt-get install g++")

    monkeypatch.setattr(native, "find_cxx", missing)
    monkeypatch.setattr(native, "load", missing)
    facts = doctor.facts()
    assert {found.name for found in facts if found.ok is False} >= {"C++ compiler", "library"}
    assert all(found.fix for found in facts if found.ok is False)
    assert not doctor.healthy(facts)
    assert "sudo apt-get install g++" in doctor.report(facts)


def test_a_check_that_breaks_is_a_red_line(monkeypatch):
    def breaks():
        raise RuntimeError("surprise")

    monkeypatch.setitem(doctor.CHECKS, "python", breaks)
    found = fact("python")
    assert (found.ok, found.value) == (False, "RuntimeError: surprise")


def test_what_is_optional_is_not_red(monkeypatch):
    def missing():
        raise native.CompilerNotFound("no nvcc")

    monkeypatch.setattr(native, "find_nvcc", missing)
    found = fact("nvcc")
    assert found.ok is None
    assert "kda-lab[cuda]" in found.fix
    assert doctor.healthy([found])


def test_an_unwritable_home_is_said(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("KDA_LAB_CACHE", raising=False)
    found = fact("cache")
    assert found.ok is None
    assert "KDA_LAB_CACHE" in found.fix


def test_a_library_that_cannot_be_loaded_is_red_with_a_fix(monkeypatch, tmp_path):
    broken = tmp_path / "libkda_cpu.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setenv("KDA_LAB_CPU_LIBRARY", str(broken))
    found = fact("library")
    assert found.ok is False
    assert "kda-lab build" in found.fix


def test_report_has_a_line_for_every_fact_and_its_fix_below():
    facts = [doctor.Fact("a", True, "fine"), doctor.Fact("b", False, "bad", "do this\nor that")]
    lines = doctor.report(facts).splitlines()
    assert lines[0].split() == ["ok", "a", "fine"]
    assert lines[1].split() == ["RED", "b", "bad"]
    assert [line.strip() for line in lines[2:]] == ["Fix: do this", "or that"]


@pytest.mark.parametrize(("ok", "healthy"), [(True, True), (None, True), (False, False)])
def test_only_red_is_unhealthy(ok, healthy):
    assert doctor.healthy([doctor.Fact("x", ok, "")]) is healthy


@pytest.mark.parametrize("name", ["Nsight Compute", "Nsight Systems", "GPU counters", "CUPTI", "ncu-report"])
def test_profiling_tools_are_among_the_facts(name):
    found = fact(name)
    assert found.ok is not False  # a walkthrough shows recorded reports where a tool is missing
    assert found.ok or found.value


def test_a_profiler_that_is_missing_comes_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(
        tools, "find", lambda name, *args: (_ for _ in ()).throw(tools.ToolMissing(f"no {name}. Get it"))
    )
    found = fact("Nsight Compute")
    assert (found.ok, found.value, found.fix) == (None, "no ncu", "Get it")
