"""Loading: the C ABI, reload after an edit, libraries built elsewhere, errors."""

from __future__ import annotations

import re
from pathlib import Path

import native_stub
import pytest
import torch

import kda_lab
from kda_lab import native
from kda_lab.native import library as native_library


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """The stub's sources are csrc, in a cache of their own; afterwards the real library is loaded again.

    The test's own monkeypatch, not a context of it: what the test changes on top must be undone first.
    """
    folder = native_stub.make_csrc(tmp_path / "csrc")
    monkeypatch.delenv("KDA_LAB_CPU_LIBRARY", raising=False)
    monkeypatch.setenv("KDA_LAB_CSRC", str(folder))
    monkeypatch.setenv("KDA_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_library, "_loaded", {})
    return folder


def value(step: int = 0) -> int:
    """The byte that the stub's forward writes."""
    return kda_lab.forward(kda_lab.make_inputs(T=1, H=1, K=8, V=8), step=step).out.view(torch.uint8).unique().item()


def test_edited_source_is_built_and_loaded_in_the_running_process(csrc):
    first = native.load("cpu")
    assert value() == 7
    native_stub.edit(csrc, "#define STUB_VALUE 7", "#define STUB_VALUE 8")
    assert value() == 8
    assert native.loaded("cpu").path != first.path
    native_stub.edit(csrc, "#define STUB_VALUE 8", "#define STUB_VALUE 7")
    assert value() == 7
    assert native.loaded("cpu").path == first.path


def test_broken_edit_raises_the_compilers_text_and_keeps_the_loaded_library(csrc):
    assert value() == 7
    before = native.loaded("cpu")
    native_stub.edit(csrc, "#define STUB_VALUE 7", "#define STUB_VALUE seven")
    for _ in range(2):
        with pytest.raises(native.BuildError, match=r"stub.cpp:\d+:\d+: error: [^\n]*seven"):
            native.load("cpu")
    assert native.loaded("cpu") is before
    inputs = kda_lab.make_inputs(T=1, H=1, K=8, V=8)
    out = inputs.new_out()
    kda_lab.fwd(*published_arguments(inputs, out), step=0)
    assert out.view(torch.uint8).unique().item() == 7
    native_stub.edit(csrc, "#define STUB_VALUE seven", "#define STUB_VALUE 9")
    assert value() == 9


def published_arguments(i, out) -> tuple:
    return (i.q, i.k, i.v, i.g, i.beta, i.scale, out, i.A_log, i.dt_bias, i.lower_bound)


def test_added_and_removed_sources_are_noticed(csrc):
    assert value() == 7
    header = csrc / "cpu" / "value.h"
    native_stub.edit(csrc, "#define STUB_VALUE 7", '#include "value.h"')
    header.write_text("#define STUB_VALUE 9")
    assert value() == 9
    header.unlink()
    with pytest.raises(native.BuildError, match=r"value.h"):
        native.load("cpu")


def test_touched_but_equal_source_is_not_loaded_again(csrc):
    before = native.load("cpu")
    (csrc / "cpu" / "stub.cpp").touch()
    assert native.load("cpu") is before


def test_fwd_does_not_look_at_the_sources(csrc, monkeypatch):
    native.load("cpu")
    monkeypatch.setattr(native_library, "_stamp", lambda path: pytest.fail("fwd looked at the sources"))
    inputs = kda_lab.make_inputs(T=1, H=1, K=8, V=8)
    kda_lab.fwd(*published_arguments(inputs, inputs.new_out()), step=0)


def test_library_with_another_abi_version_is_refused(csrc):
    native_stub.edit(csrc, "return KDA_ABI_VERSION;", "return KDA_ABI_VERSION + 1;")
    ours = native_library.ABI_VERSION
    message = rf"version {ours + 1} of the C ABI, this kda_lab has {ours}: build it again"
    with pytest.raises(native.LibraryError, match=message):
        native.load("cpu")


def test_abi_version_is_the_headers():
    header = (native.csrc_dir() / "kda.h").read_text()
    assert int(re.search(r"#define KDA_ABI_VERSION (\d+)", header)[1]) == native_library.ABI_VERSION


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["missing", "rubbish"])
def test_file_that_is_no_library(content, tmp_path, monkeypatch):
    path = tmp_path / "libkda_cpu.so"
    if content:
        path.write_bytes(content)
    monkeypatch.setattr(native_library, "_loaded", {})
    monkeypatch.setenv("KDA_LAB_CPU_LIBRARY", str(path))
    with pytest.raises(native.LibraryError, match=f"{path} cannot be loaded as a kda_lab library"):
        native.load("cpu")


def test_prebuilt_library_is_loaded_without_a_compiler(csrc, monkeypatch):
    path = native.build("cpu")
    monkeypatch.setenv("KDA_LAB_CPU_LIBRARY", str(path))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("KDA_LAB_CSRC", "/nonexistent")
    library = native.load("cpu")
    assert library.path == path
    assert library.sha256 == native.cache.sha256(path)


def test_arguments_arrive_in_c_as_python_named_them(csrc):
    library = native.load("cpu")
    out, state, workspace = (torch.zeros(4096) for _ in range(3))
    aligned = -(-workspace.data_ptr() // 256) * 256
    given = {
        **{name: index for index, name in enumerate("BTHKVN", start=1)},
        **{name: 1000 + index for index, name in enumerate(("q", "k", "v", "g", "beta", "A_log", "dt_bias"))},
        **{"chunk": 16, "initial_state": 2000, "cu_seqlens": 2001, "device": 5, "precise": 1, "stream": 2002},
        **{"initial_state_dtype": 1, "final_state_dtype": 2, "cu_seqlens_dtype": 3},
        **{"out": out.data_ptr(), "final_state": state.data_ptr(), "workspace": aligned, "workspace_bytes": 100},
    }
    size = native_library.ctypes.sizeof(native.KdaArgs)
    library.forward(0, native.KdaArgs(struct_bytes=size, scale=0.25, lower_bound=-5.5, **given))
    expected = {**given, "struct_bytes": size, "scale": 250, "lower_bound": -5500, "push_range": 0, "pop_range": 0}
    assert native_stub.last_args(library) == expected
    assert {name for name, _ in native.KdaArgs._fields_} == set(expected)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (1, ValueError),
        (2, NotImplementedError),
        (3, native.LibraryError),
        (4, MemoryError),
        (5, native.LibraryError),
    ],
)
def test_status_becomes_an_exception_with_the_librarys_text(status, kind, csrc):
    library = native.load("cpu")
    with pytest.raises(kind, match=f"status {status} from step 3"):
        library.forward(3, native.KdaArgs(T=600 + status))


def test_workspace_error_becomes_an_exception(csrc):
    with pytest.raises(NotImplementedError, match="no workspace for T = 601"):
        native.load("cpu").workspace_bytes(0, native.KdaArgs(T=601))


def test_unknown_device():
    with pytest.raises(ValueError, match="device is 'tpu'; expected one of 'cpu', 'cuda'"):
        native.load("tpu")


def test_source_check_is_cheap(csrc):
    import timeit

    native.load("cpu")
    seconds = min(timeit.repeat(lambda: native.load("cpu"), number=10, repeat=20)) / 10
    assert seconds < 5e-4, f"load() of a loaded library took {seconds * 1e6:.0f} µs"


def test_cache_dir_is_a_path():
    assert isinstance(native.cache_dir(), Path)
