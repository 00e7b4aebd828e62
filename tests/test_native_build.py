"""Builds end well: two at once, killed, damaged, without a compiler, without a home."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import native_stub
import pytest

from kda_lab import native
from kda_lab.native import cache, compilers


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    return native_stub.make_csrc(tmp_path / "csrc with a space é")


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A C++ compiler that notes every compilation of the stub in compilations.txt, and is slow while `slow` exists."""
    script = tmp_path / "bin" / "logging-c++"
    script.parent.mkdir()
    script.write_text(
        f"""#!/bin/sh
case "$*" in
  *" -c "*stub.cpp*)
    echo "$*" >> '{tmp_path}/compilations.txt'
    if [ -e '{tmp_path}/slow' ]; then sleep 2; fi ;;
esac
exec {shutil.which("c++")} "$@"
"""
    )
    script.chmod(0o755)
    return script


def compilations(tmp_path: Path) -> int:
    log = tmp_path / "compilations.txt"
    return len(log.read_text().splitlines()) if log.exists() else 0


def command_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


def test_first_build_says_what_it_does_and_the_second_is_silent(csrc, compiler, tmp_path):
    environment = native_stub.environment(csrc, tmp_path / "cache with a space é", CXX=str(compiler))
    status, first, stderr = native_stub.finish(native_stub.start_build(environment))
    assert status == 0, stderr
    assert "building libkda_cpu" in stderr
    assert "built libkda_cpu" in stderr
    status, second, stderr = native_stub.finish(native_stub.start_build(environment))
    assert (status, second, stderr) == (0, first, "")
    assert compilations(tmp_path) == 1
    facts = json.loads((Path(first).parent / "built.json").read_text())
    assert facts["sha256"] == cache.sha256(Path(first))


def test_two_processes_at_once_build_once(csrc, compiler, tmp_path):
    (tmp_path / "slow").touch()
    environment = native_stub.environment(csrc, tmp_path / "cache", CXX=str(compiler))
    results = [native_stub.finish(p) for p in [native_stub.start_build(environment) for _ in range(2)]]
    assert [status for status, _, _ in results] == [0, 0], results
    assert results[0][1] == results[1][1] != ""
    assert sum("waiting for another process" in stderr for _, _, stderr in results) == 1
    assert sum("built libkda_cpu" in stderr for _, _, stderr in results) == 1
    assert compilations(tmp_path) == 1


def test_nothing_of_a_killed_build_is_used(csrc, compiler, tmp_path):
    (csrc / "cpu" / "other.cpp").write_text("int other() { return 1; }")
    with open(csrc / "CMakeLists.txt", "a") as lists:
        lists.write("target_sources(kda_cpu PRIVATE cpu/other.cpp)\n")
    environment = native_stub.environment(csrc, tmp_path / "cache", CXX=str(compiler))
    status, first, stderr = native_stub.finish(native_stub.start_build(environment))
    assert status == 0, stderr

    native_stub.edit(csrc, "#define STUB_VALUE 7", "#define STUB_VALUE 8")
    (tmp_path / "slow").touch()
    killed = native_stub.start_build(environment)
    wait_for(lambda: compilations(tmp_path) == 2, "the second compilation")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert [str(path) for path in (tmp_path / "cache").glob("libraries/*/*.so")] == [first]
    (tmp_path / "slow").unlink()

    # Worse than what a kill leaves: an object file of that tree, finished and newer than its source, is rubbish.
    (rubbish,) = (tmp_path / "cache").glob("trees/*/build/CMakeFiles/kda_cpu.dir/cpu/other.cpp.o")
    before = rubbish.stat()
    rubbish.write_bytes(b"half an object file")
    os.utime(rubbish, ns=(before.st_atime_ns, before.st_mtime_ns))
    status, second, stderr = native_stub.finish(native_stub.start_build(environment))
    assert status == 0, stderr
    assert second != first
    assert not list((tmp_path / "cache").glob("trees/*/unfinished"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_build_that_is_called_off_leaves_no_compiler_running(number, csrc, compiler, tmp_path):
    environment = native_stub.environment(csrc, tmp_path / "cache", CXX=str(compiler))
    (tmp_path / "slow").touch()
    ignored = signal.signal(number, signal.default_int_handler)  # under nohup; a child would ignore it, too
    build = subprocess.Popen(
        [sys.executable, "-m", "kda_lab.cli", "build"], env=environment, stderr=subprocess.PIPE, text=True
    )
    signal.signal(number, ignored)
    wait_for(lambda: compilations(tmp_path), "a compilation")
    build.send_signal(number)
    stderr = build.communicate(timeout=30)[1]
    assert build.returncode == 128 + number
    assert "Traceback" not in stderr
    with cache.locked(next((tmp_path / "cache").glob("trees/*.lock")), "it"):  # no child holds it any more
        pass
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in command_line(path)]
    assert not running
    (tmp_path / "slow").unlink()
    assert native_stub.finish(native_stub.start_build(environment))[0] == 0


def flip_a_byte(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        lambda library: library.write_bytes(library.read_bytes()[:1000]),
        lambda library: library.unlink(),
        lambda library: (library.parent / "built.json").unlink(),
        lambda library: (library.parent / "built.json").write_text("{"),
        lambda library: (library.parent / "built.json").write_text("[]"),
    ],
    ids=["flipped byte", "truncated", "no library", "no facts", "half the facts", "other facts"],
)
def test_damaged_library_is_built_again(damage, csrc, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("KDA_LAB_CACHE", str(tmp_path / "cache"))
    library = native.build("cpu", csrc)
    good = library.read_bytes()
    capfd.readouterr()
    damage(library)
    assert native.build("cpu", csrc) == library
    assert library.read_bytes() == good
    assert "is damaged" in capfd.readouterr().err
    assert not list(library.parent.parent.glob(".*")), "temporary folders were left behind"


def test_key_covers_sources_flags_and_compiler(csrc, compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    seen = {native.build("cpu", csrc)}
    with monkeypatch.context() as changed:
        changed.setenv("CXXFLAGS", "-DSOMETHING")
        seen.add(native.build("cpu", csrc))
    with monkeypatch.context() as changed:
        changed.setenv("CXX", str(compiler))
        seen.add(native.build("cpu", csrc))
    (csrc / "cuda").mkdir()
    (csrc / "cuda" / "kernel.cu").write_text("not part of the CPU library")
    assert native.build("cpu", csrc) in seen
    (csrc / "common").mkdir()
    (csrc / "common" / "checks.h").write_text("// part of both libraries")
    seen.add(native.build("cpu", csrc))
    native_stub.edit(csrc, "#define STUB_VALUE 7", "#define STUB_VALUE 8")
    seen.add(native.build("cpu", csrc))
    assert len(seen) == 5


def test_source_with_an_older_time_stamp_is_compiled(csrc, tmp_path, monkeypatch):
    """Ninja alone would take the object file, which is newer than the source."""
    monkeypatch.setenv("KDA_LAB_CACHE", str(tmp_path / "cache"))
    first = native.build("cpu", csrc).read_bytes()
    native_stub.edit(csrc, "#define STUB_VALUE 7", "#define STUB_VALUE 8")
    os.utime(csrc / "cpu" / "stub.cpp", (1, 1))
    assert native.build("cpu", csrc).read_bytes() != first


def test_compile_error_shows_the_compilers_text_with_the_readers_path(csrc, tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_LAB_CACHE", str(tmp_path / "cache"))
    native_stub.edit(csrc, "++calls;", "++cals;")
    with pytest.raises(native.BuildError, match="cals") as raised:
        native.build("cpu", csrc)
    message = str(raised.value)
    assert f"{csrc}/cpu/stub.cpp:" in message
    assert "error:" in message
    assert "ninja" not in message
    assert "FAILED" not in message
    assert "FAILED" in raised.value.log
    assert not list((tmp_path / "cache").glob("trees/*/unfinished")), "the next build would start from nothing"
    native_stub.edit(csrc, "++cals;", "++calls;")
    assert native.build("cpu", csrc).is_file()


def test_cmake_error_shows_its_text(csrc, tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_LAB_CACHE", str(tmp_path / "cache"))
    (csrc / "CMakeLists.txt").write_text('message(FATAL_ERROR "no such luck")')
    with pytest.raises(native.BuildError, match="no such luck"):
        native.build("cpu", csrc)


def test_missing_compiler_is_named_with_the_command_that_installs_it(csrc, tmp_path):
    environment = native_stub.environment(csrc, tmp_path / "cache", PATH="/nonexistent")
    status, _, stderr = native_stub.finish(native_stub.start_build(environment))
    assert status != 0
    assert "CompilerNotFound: a C++ compiler is needed" in stderr
    assert "looked for c++, g++ and clang++ on PATH" in stderr
    assert "sudo apt-get install g++" in stderr


@pytest.mark.parametrize(
    ("variable", "find", "program"),
    [("CXX", native.find_cxx, "a C\\+\\+ compiler"), ("CUDACXX", native.find_nvcc, "nvcc")],
)
def test_variable_that_names_no_program(variable, find, program, monkeypatch):
    monkeypatch.setenv(variable, "/nonexistent/compiler")
    with pytest.raises(native.CompilerNotFound, match=f"{program} is needed.*{variable} is '/nonexistent/compiler'"):
        find()


def test_compiler_that_does_not_run(tmp_path, monkeypatch):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(native.CompilerNotFound, match=r"exit status 3[^$]*out of order"):
        native.find_cxx()


@pytest.mark.parametrize("tool", ["cmake", "ninja"])
def test_missing_build_tool(tool, monkeypatch):
    monkeypatch.setenv("CXX", native.find_cxx().path)
    found = compilers._find_program
    absent = [tool]
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compilers.shutil, "which", lambda name, **_: None if name in absent else f"/usr/bin/{name}")
    with pytest.raises(native.CompilerNotFound, match=f"{tool} is needed[^$]*pip install {tool}"):
        found(tool, "BIN_DIR")


def test_missing_nvcc_names_the_pip_wheels(monkeypatch):
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(compilers.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(compilers, "_wheel_nvccs", lambda: [])
    with pytest.raises(native.CompilerNotFound, match=r"pip install .cuda-toolkit\[nvcc,cudart,cccl\]"):
        native.find_nvcc()


@pytest.mark.parametrize(
    ("asked", "gpus", "listed", "expected"),
    [
        (None, [], "compute_80 compute_90 compute_100 compute_120", ("80", "90a-real", "100a-real", "120a-real")),
        (None, [], "compute_80 compute_90", ("80", "90a-real")),
        (None, [(9, 0), (9, 0)], "", ("90a-real",)),
        (None, [(8, 6), (12, 0)], "", ("120a-real", "86-real")),
        (None, [(10, 3)], "", ("103a-real",)),
        ("90a,80", [(8, 6)], "", ("90a", "80")),
    ],
)
def test_cuda_architectures(asked, gpus, listed, expected, monkeypatch):
    monkeypatch.delenv("KDA_LAB_CUDA_ARCHS", raising=False)
    if asked:
        monkeypatch.setenv("KDA_LAB_CUDA_ARCHS", asked)
    monkeypatch.setattr(compilers, "_gpu_capabilities", lambda: gpus)
    monkeypatch.setattr(compilers, "_output", lambda command: listed)
    assert compilers.cuda_architectures(compilers.Compiler("nvcc", "release 0")) == expected


@pytest.mark.slow
@pytest.mark.cuda_compiler
def test_cuda_library_builds_and_loads_without_a_gpu(csrc, tmp_path):
    environment = native_stub.environment(csrc, tmp_path / "cache with a space é", KDA_LAB_CUDA_ARCHS="90a-real")
    status, path, stderr = native_stub.finish(native_stub.start_build(environment, "cuda"))
    assert status == 0, stderr
    assert Path(path).name.startswith("libkda_cuda.")
    facts = json.loads((Path(path).parent / "built.json").read_text())
    assert facts["architectures"] == ["90a-real"]
    assert "nvcc" in facts["compiler"]


@pytest.mark.parametrize("home", ["/dev/null", None], ids=["unwritable", "none"])
def test_without_a_home_a_private_temporary_folder_is_used_and_named(home, csrc, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    changes = {"KDA_LAB_CACHE": None, "XDG_CACHE_HOME": "/dev/null" if home is None else None, "HOME": home}
    environment = native_stub.environment(csrc, tmp_path, TMPDIR=str(temporary), **changes)
    for first in (True, False):
        status, path, stderr = native_stub.finish(native_stub.start_build(environment))
        assert status == 0, stderr
        assert Path(path).is_relative_to(temporary)
        assert "cannot write the cache folder" in stderr
        assert "Set KDA_LAB_CACHE" in stderr
        assert ("building" in stderr) == first
    assert stat.S_IMODE(Path(path).parents[2].stat().st_mode) == 0o700


def test_temporary_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"kda_lab-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    folder = cache._private_temporary_folder()
    assert folder != planted
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_libraries_unused_for_a_month_are_dropped(csrc, tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_LAB_CACHE", str(tmp_path / "cache"))
    old = native.build("cpu", csrc)
    month_ago = time.time() - 32 * 24 * 3600
    os.utime(old.parent, (month_ago, month_ago))
    native_stub.edit(csrc, "#define STUB_VALUE 7", "#define STUB_VALUE 8")
    new = native.build("cpu", csrc)
    assert not old.exists()
    assert new.exists()


def test_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", flock)
    with (
        pytest.raises(native.BuildError, match=r"tree.lock cannot be locked .*No locks available.*KDA_LAB_CACHE"),
        cache.locked(tmp_path / "tree.lock", "it"),
    ):
        pass


def test_missing_sources_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_LAB_CSRC", str(tmp_path / "nowhere"))
    with pytest.raises(native.BuildError, match=r"no CMakeLists.txt in .*nowhere"):
        native.csrc_dir()


def test_unknown_device():
    with pytest.raises(ValueError, match="device is 'tpu'; expected one of 'cpu', 'cuda'"):
        native.build("tpu")
