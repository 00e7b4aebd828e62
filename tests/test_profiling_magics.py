"""The notebook magics, run in an IPython shell."""

from __future__ import annotations

import json

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from kda_lab import annotate


@pytest.fixture
def shell():
    shell = InteractiveShell()
    shell.extension_manager.load_extension("kda_lab.magics")
    return shell


def test_nvtx_runs_the_cell_inside_a_named_range(shell, monkeypatch):
    opened = []
    enter = annotate.range.__enter__
    monkeypatch.setattr(annotate.range, "__enter__", lambda self: opened.append(self._name) or enter(self))
    shell.run_cell_magic("nvtx", "my cell", "answer = 6 * 7")
    assert opened == ["my cell"]
    assert shell.user_ns["answer"] == 42


def test_an_error_in_the_cell_is_raised(shell):
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("nvtx", "", "1 / 0")


def test_profile_shows_the_timeline_of_the_cell_and_saves_a_trace(shell, tmp_path, capsys):
    shell.run_cell("import kda_lab; inputs = kda_lab.make_inputs(T=32, H=1)")
    shell.run_cell_magic("kda_profile", f"--save {tmp_path / 'trace.json'}", "result = kda_lab.forward(inputs, step=3)")
    assert "Timeline by torch.profiler" in capsys.readouterr().out
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"3_factored", "3_factored/forward"} <= names


def test_diff_shows_what_changes_between_two_steps(shell):
    shown = shell.run_line_magic("kda_diff", "1 2 --stage activate_gate")
    assert "1_naive_exp" in repr(shown)
    assert "2_rebased_ex2" in repr(shown)


def test_a_mistake_is_a_usage_error_and_not_the_end_of_the_kernel(shell):
    with pytest.raises(UsageError, match="usage: %kda_diff"):
        shell.run_line_magic("kda_diff", "1")
