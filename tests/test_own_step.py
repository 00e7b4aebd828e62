"""A reader's step: the files that ship are right, and whatever a broken one does is a sentence in the report."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from kda_lab import native, own_step

FAST = own_step.example("fast").read_text(encoding="utf-8")
BEGIN = "void forward(const KdaArgs& args) {\n"


def write(folder, *changes: tuple[str, str]):
    text = FAST
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / "mine.cpp"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start", "fast"])
def test_examples_are_right_and_timed_beside_the_ladder(name):
    report = own_step.run(own_step.example(name))
    assert report.right, str(report)
    assert {check.case for check in report.checks} == set(own_step.cases())
    assert [row["slug"] for row in report.times][-1] == "own_step"
    assert len(report.times) == 6
    assert report.median_ms > 0
    assert "is right and takes" in str(report)
    assert report.machine["date"]


def test_a_wrong_step_is_not_timed(tmp_path):
    report = own_step.run(write(tmp_path, ("const float corrected = beta * (", "const float corrected = (")))
    assert not report.right
    assert not report.failure
    assert report.median_ms is None
    assert "mixed (out " in str(report)
    assert len(report.checks) == len(own_step.cases())


def test_what_is_not_written_is_not_right(tmp_path):
    report = own_step.run(write(tmp_path, ("    store_state(args, n, h, 0, args.V, state);\n", "")))
    assert not report.right
    assert "state nan" in report.wrong


BROKEN = {
    "crash": ((BEGIN, BEGIN + "  *reinterpret_cast<volatile int*>(args.N * 8) = 1;\n"), "SIGSEGV"),
    "write beyond out": (("out[v] = bf16(sum);", "out[v + args.V] = bf16(sum);"), "memory that is not its own"),
    "read beyond v": (("(values[v] - recalled)", "(values[v + args.V] - recalled)"), "memory that is not its own"),
    "ends the process": (("#include <cmath>", "#include <cmath>\n#include <unistd.h>"), "ended the process"),
    "workspace": (("return arena.used();", "return arena.used() + (int64_t{1} << 42);"), "MB of memory|alloc"),
    "heap": ((BEGIN, BEGIN + "  std::vector<char> hog(int64_t{1} << 36, 1);\n"), "memory"),
    "exception on a thread": (("  prepare(args, row, h, head);\n", "  throw 1;\n"), "SIGABRT"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_step_costs_a_sentence(tmp_path, name):
    change, sentence = BROKEN[name]
    changes = [change]
    if name == "ends the process":
        changes.append((BEGIN, BEGIN + "  _exit(0);\n"))
    report = own_step.run(write(tmp_path, *changes))
    assert not report.right
    assert report.median_ms is None
    assert sentence.split("|")[0] in report.failure or sentence.split("|")[-1] in report.failure, report.failure
    assert "mine.cpp" in str(report)


def test_an_endless_loop_ends(tmp_path):
    path = write(tmp_path, ("  prepare(args, row, h, head);\n", "  for (volatile int i = 0;; i = i + 1) {}\n"))
    own_step.build(path)
    begin = time.monotonic()
    report = own_step.run(path, seconds=2)
    assert "did not end within 2 s" in report.failure
    assert "That was in: forget" in report.failure
    assert time.monotonic() - begin < 30


def test_compiler_speaks_of_the_readers_file(tmp_path):
    path = write(tmp_path, ("float recalled = 0.0f, sum = 0.0f;", "float recalled = 0.0f;"))
    report = own_step.run(path)
    assert report.failure.startswith("It does not compile.")
    assert f"{path}:" in report.failure
    assert "sum" in report.failure
    assert "step7" not in report.failure.split(str(path))[0]


@pytest.mark.parametrize(
    ("text", "missing"),
    [("", "workspace_bytes"), ("int forward;", "workspace_bytes")],
    ids=["empty", "another namespace"],
)
def test_a_file_that_defines_nothing_is_told_so_in_a_sentence(tmp_path, capfd, text, missing):
    path = tmp_path / "mine.cpp"
    path.write_text(text)
    report = own_step.run(path)
    assert report.failure.startswith(f"It compiles, but does not define {missing}(const KdaArgs&) in namespace")
    assert "Traceback" not in str(report)
    assert capfd.readouterr() == ("", ""), "what succeeds is quiet"


def test_start_writes_a_file_once(tmp_path):
    path = own_step.start(tmp_path / "mine.cpp")
    assert path.read_text(encoding="utf-8") == own_step.example("start").read_text(encoding="utf-8")
    with pytest.raises(FileExistsError):
        own_step.start(path)
    cuda = own_step.start(tmp_path / "mine.cu").read_text(encoding="utf-8")
    assert "namespace kda::step7 {" in cuda
    assert "step0" not in cuda
    with pytest.raises(ValueError, match=r"'\.py'; expected a \.cpp"):
        own_step.start(tmp_path / "mine.py")


def test_guarded_tensors_keep_their_values():
    for tensor in (torch.randn(3, 5), torch.randn(4, 4).bfloat16(), torch.arange(5), torch.empty(0)):
        copy = own_step.guarded(tensor)
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.data_ptr() % 16 == 0


def test_guard_ends_a_read_beyond():
    code = (
        "import ctypes, torch; from kda_lab.own_step import guarded\n"
        "x = guarded(torch.ones(16)); ctypes.string_at(x.data_ptr(), x.nbytes); print('inside', flush=True)\n"
        "ctypes.string_at(x.data_ptr() + x.nbytes, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "inside"
    assert done.returncode < 0


def test_examples_follow_the_style_of_csrc():
    clang_format = pytest.importorskip("clang_format").get_executable("clang-format")
    files = [str(own_step.example(name)) for name in ("start", "fast")]
    style = f"--style=file:{native.csrc_dir().parent / '.clang-format'}"
    subprocess.run([clang_format, style, "--dry-run", "--Werror", *files], check=True)


def test_the_limits_are_the_childs_alone():
    resource = pytest.importorskip("resource")
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_the_readers_step_is_timed_though_only_its_own_library_lists_it(monkeypatch):
    def step(number, *devices, capability=0):
        return SimpleNamespace(number=number, slug=f"s{number}", devices=devices, compute_capability=capability)

    steps = (step(0, "cpu"), step(5, "cpu", "cuda"), step(6, "cuda", capability=90), step(own_step.NUMBER, "cuda"))
    monkeypatch.setattr(own_step.native, "load", {"cuda": SimpleNamespace(steps=steps)}.__getitem__)
    monkeypatch.setattr(own_step, "make_inputs", lambda **_: None)
    monkeypatch.setattr(own_step.bench, "time_call", lambda *_, **__: (1.0,))
    monkeypatch.setattr(own_step.registry, "capability", lambda: 80)
    told = []
    own_step._time("cuda", lambda **event: told.append(event))
    assert [event["time"]["step"] for event in told if "time" in event] == [5, own_step.NUMBER]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cuda_step_is_built_checked_and_timed(tmp_path):
    report = own_step.run(own_step.start(tmp_path / "mine.cu"), seconds=300)
    assert report.right, str(report)
    assert report.device == "cuda"
    assert report.median_ms > 0
