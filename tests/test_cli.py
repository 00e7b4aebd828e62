"""kda-lab from outside: what it prints, and that a mistake is one clean line and exit status 2."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kda_lab import bench, cli, native, registry, tour
from kda_lab.profiling import recorded


def run(capsys, *argv: str) -> tuple[int, str, str]:
    try:
        status = cli.main(list(argv))
    except SystemExit as stop:  # argparse
        status = stop.code
    out, err = capsys.readouterr()
    return status, out, err


def test_module_runs_as_a_program_and_help_names_every_command():
    done = subprocess.run([sys.executable, "-m", "kda_lab.cli", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    names = [
        "tour",
        "book",
        "lab",
        "build",
        "steps",
        "ladder",
        "explore",
        "claims",
        "grade",
        "profile",
        "sass",
        "doctor",
        "diff",
    ]
    for name in names:
        assert re.search(rf"^    {name}\b", done.stdout, re.MULTILINE), name


def test_help_does_not_import_torch():
    code = "import sys\nfrom kda_lab import cli\ntry: cli.main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["diff", "1", "9"], "9"),
        (["diff", "1", "fused_one_kernel", "--device", "cpu"], "cuda"),
        (["ladder", "--device", "cpu", "--step", "nosuch"], "nosuch"),
        (["ladder", "-T", "0"], "-T"),
        (["ladder", "-H", "many"], "-H"),
        (["explore", "--chunk", "17"], "17"),
        (["explore", "--lower-bound", "nan"], "lower_bound"),
        (["explore", "--gate", "nosuch"], "nosuch"),
        (["tour", "42"], "42"),
        (["tour", "--output", f"{__file__}/book", "0"], "--output"),
        (["nosuch"], "nosuch"),
        ([], "COMMAND"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, monkeypatch, argv, expected):
    for module, function in ((bench, "measure_bound"), (tour, "execute")):
        monkeypatch.setattr(module, function, lambda *_: pytest.fail("it began to work"))
    status, out, err = run(capsys, *argv)
    assert status == 2
    assert expected in err.strip().splitlines()[-1]
    assert "Traceback" not in out + err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys):
    status, out, err = run(capsys, "ladder", "--device", "cuda")
    assert (status, out) == (2, "")
    assert "torch finds no GPU here" in err.strip().splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_damaged_recording_is_named_before_anything_is_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "measure_bound", lambda device: pytest.fail("it began to work"))
    (tmp_path / "ladder.json").write_text("[]")
    for folder, message in ((tmp_path, "ladder.json has no object"), (tmp_path / "none", "no recording")):
        monkeypatch.setenv("KDA_LAB_RECORDED", str(folder))
        status, out, err = run(capsys, "ladder", "--step", "5")
        assert (status, out) == (2, "")
        assert message in err


def test_sizes_beyond_the_memory_are_a_mistake(capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_bound", lambda device: bench.Bound(1e11, 1e10))
    status, out, err = run(capsys, "ladder", "--device", "cpu", "-T", str(10**11), "--step", "5")
    assert (status, out) == (2, "")
    assert "allocate" in err


ODD_TERMINALS = [
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "ascii:strict"},
    {"PYTHONIOENCODING": "latin-1"},
]


@pytest.mark.parametrize("terminal", ODD_TERMINALS)
@pytest.mark.parametrize(
    "command",
    [
        ["ladder", "--device", "cpu", "-T", "16", "-H", "1", "--step", "5"],
        ["steps"],
        ["diff", "1", "2"],
        ["explore", "--lower-bound", "-6"],
        ["--help"],
    ],
    ids=lambda command: command[0],
)
def test_every_terminal_can_show_what_is_printed(command, terminal):
    program = [sys.executable, "-m", "kda_lab.cli", *command]
    done = subprocess.run(program, env={**os.environ, **terminal}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"Error" not in done.stderr
    if command[0] == "ladder" and "ascii" in str(terminal):
        assert b"? faster" in done.stdout


def test_steps_lists_the_registry(capsys):
    status, out, _ = run(capsys, "steps")
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()] == [[str(s.number), s.slug] for s in registry.steps()]


def test_build_prints_the_library(capsys):
    status, out, _ = run(capsys, "build")
    assert status == 0
    assert out.strip().endswith("libkda_cpu.so")


def test_diff_is_a_unified_diff_of_the_two_sources(capsys):
    status, out, _ = run(capsys, "diff", "1", "rebased_ex2")
    lines = out.splitlines()
    assert status == 0
    assert lines[:2] == ["--- 1_naive_exp.cpp", "+++ 2_rebased_ex2.cpp"]
    assert any(line.startswith("+") and "exp2f" in line for line in lines)
    assert any(line.startswith("-") and "expf" in line for line in lines)
    assert "\033" not in out  # no colours into a pipe


def test_diff_counts_lines_as_the_files_do_and_takes_cuda_where_no_cpu_has_the_step(capsys):
    status, out, _ = run(capsys, "diff", "5", "6")
    assert status == 0
    folder = native.csrc_dir() / "cuda" / "steps"
    files = {path.name: path for path in (folder / "6_register_state").glob("*.cuh")}
    assert set(files) == set(re.findall(r"^\+// ---- 6_register_state/(.+)$", out, flags=re.MULTILINE))
    before, after = None, folder / "6_register_state.cu"
    for line in out.splitlines()[2:]:
        if hunk := re.fullmatch(r"@@ -(\d+),\d+ \+(\d+),\d+ @@", line):
            before, number = int(hunk[1]), int(hunk[2])
        elif begins := re.fullmatch(r"\+// ---- (?:6_register_state/)?(\w+\.cuh?)", line):
            after, number = files.get(begins[1], folder / begins[1]), None
        elif line[0] != "-" and number is not None:
            assert after.read_text().splitlines()[number - 1] == line[1:]
            number += 1
    assert before


def test_a_closed_pipe_is_no_traceback():
    command = f"'{sys.executable}' -m kda_lab.cli diff 1 5 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.strip() == "--- 1_naive_exp.cpp"
    assert done.stderr == ""


def test_a_pipe_that_closes_before_the_last_words_is_no_traceback():
    """What is left in the buffer goes out at the end of the process, where an error is printed and ignored."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "kda_lab.cli", "steps"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdout=write_end, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(read_end)
    os.close(write_end)
    assert process.communicate()[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_ladder_json_has_machine_bound_and_rows(capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_bound", lambda device: bench.Bound(1e11, 1e10))
    argv = ["ladder", "--device", "cpu", "-T", "32", "-H", "4", "--step", "2", "--step", "factored", "--json"]
    status, out, err = run(capsys, *argv)
    record = json.loads(out)
    assert status == 0
    assert "step 2" in err
    assert record["bound"] == {"flops_per_s": 1e11, "bytes_per_s": 1e10}
    assert [row["step"] for row in record["rows"]] == [2, 3]
    assert record["machine"]["date"]
    row = record["rows"][0]
    assert row["median_ms"] == pytest.approx(sorted(row["samples_ms"])[len(row["samples_ms"]) // 2], rel=0.5)


def test_a_refused_step_is_status_1(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise bench.CheckFailed("step 2 is wrong")

    monkeypatch.setattr(bench, "measure_bound", lambda device: bench.Bound(1e11, 1e10))
    monkeypatch.setattr(bench, "check", refuse)
    status, out, _ = run(capsys, "ladder", "--device", "cpu", "-T", "16", "-H", "1", "--step", "2")
    assert status == 1
    assert "refused" in out
    assert "step 2 is wrong" in out


def test_explore_prints_the_verdict_and_saves_the_picture(capsys, tmp_path):
    picture = tmp_path / "é fig.png"
    status, out, _ = run(capsys, "explore", "--lower-bound", "-5.45", "--chunk", "16", "--save", str(picture))
    assert status == 0
    assert "wrong" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_explore_into_a_missing_folder_is_a_clean_error(capsys, tmp_path):
    status, _, err = run(capsys, "explore", "--save", str(tmp_path / "none" / "fig.png"))
    assert status == 2
    assert "No such file" in err


def test_doctor_json_agrees_with_its_status(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert status == (1 if any(fact["ok"] is False for fact in facts) else 0)
    assert {"python", "torch", "C++ compiler", "library", "GPU", "nvcc"} <= {fact["name"] for fact in facts}


def test_profile_prints_the_stages_of_a_step(capsys, tmp_path):
    arguments = ("--step", "3", "--device", "cpu", "-T", "32", "-H", "1", "--out", str(tmp_path))
    status, out, _ = run(capsys, "profile", *arguments)
    assert status == 0
    assert "invert_unit_lower" in out
    status, _, err = run(capsys, "profile", *arguments, "--tool", "ncu")
    assert status == 2
    assert "Nsight profiles GPUs" in err


def test_sass_prints_machine_code_or_what_is_missing(capsys):
    status, out, err = run(capsys, "sass", "exp_throughput")
    assert ("MUFU.EX2" in out) if status == 0 else ("Install it with" in err)
    status, _, err = run(capsys, "sass", "5", "--arch", "gfx90a")
    assert status == 2
    assert "arch is 'gfx90a'" in err


def test_lab_starts_in_the_project_and_passes_options_on(monkeypatch):
    started = []
    monkeypatch.setattr("os.execv", lambda path, command: started.append(command))
    cli.main(["lab", "--no-browser", "--port", "8899"])
    assert started[0][-3:] == ["--no-browser", "--port", "8899"]
    (root,) = [part.split("=", 1)[1] for part in started[0] if part.startswith("--notebook-dir=")]
    (page,) = [part.split("/lab/tree/", 1)[1] for part in started[0] if "default_url=" in part]
    assert (Path(root) / page).is_file()
    assert (Path(root) / "docs" / "glossary.md").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: live numbers take the recorded ones' place")
def test_ladder_shows_recorded_gpu_times_where_there_is_no_gpu(capsys, monkeypatch, tmp_path):
    argv = ("ladder", "-T", "16", "-H", "1", "--step", "2")
    recording = recorded.load(recorded.available()[0])
    _, out, _ = run(capsys, *argv)
    assert recording.ladder_label in out
    row = next(row for row in recording.ladder()["rows"] if row.get("step") == 0)
    assert f"{row['median_ms']:.4g}" in out
    (tmp_path / "machine.json").write_text('{"gpu": "A GPU", "date": "2026-01-02"}')
    monkeypatch.setenv("KDA_LAB_RECORDED", str(tmp_path))
    _, out, _ = run(capsys, *argv)
    assert "recorded on A GPU, 2026-01-02: not measured" in out
