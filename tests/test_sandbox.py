"""Whatever a process in the sandbox started, and however the process ended, nothing of it is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kda_lab import sandbox

START = {
    "a child": "subprocess.Popen(SLEEP)",
    "a session of its own": "subprocess.Popen(SLEEP, start_new_session=True)",
    "a daemon": "os.fork() or (os.setsid(), os.fork() and os._exit(0), os.execvp(SLEEP[0], SLEEP))",
    "a sandbox in the sandbox": "threading.Thread(target=sandbox.run, args=(['-c', NESTED],), kwargs={'seconds': 9}, "
    "daemon=True).start()",
}
END = {
    "ends": "",
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "time.sleep(600)",
    "runs out of time": "sandbox.limit(0.2, 4096); time.sleep(600)",
}
PROGRAM = """
import os, signal, subprocess, sys, threading, time
from kda_lab import sandbox
SLEEP = [sys.executable, "-c", "import time, pathlib; pathlib.Path(%(ready)r).touch(); time.sleep(601)"]
NESTED = "import subprocess; subprocess.run(%%r, start_new_session=True)" %% (SLEEP,)
%(start)s
while not os.path.exists(%(ready)r):
    time.sleep(0.01)
%(end)s
"""


def running(text: str) -> bool:
    """Whether a process has `text` in its command line; a zombie has no command line any more."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("start", START)
def test_nothing_is_left(start: str, end: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "_STARTING", 3.0)
    program = PROGRAM % {"ready": str(tmp_path / "ready"), "start": START[start], "end": END[end]}
    outcome = sandbox.run(["-c", program], seconds=1)
    assert (tmp_path / "ready").exists(), outcome.text
    assert outcome.timed_out == (end in ("hangs", "runs out of time")), outcome
    assert ("SIGSEGV" in outcome.failure) == (end == "crashes"), outcome
    assert not running(str(tmp_path))


def test_nothing_is_left_when_the_user_interrupts(tmp_path) -> None:
    program = PROGRAM % {"ready": str(tmp_path / "ready"), "start": START["a daemon"], "end": END["hangs"]}
    code = f"from kda_lab import sandbox; sandbox.run(['-c', {program!r}], seconds=60)"
    user = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    while not (tmp_path / "ready").exists():
        assert user.poll() is None
        time.sleep(0.02)
    user.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in user.communicate(timeout=30)[1]
    assert not running(str(tmp_path))


def test_a_process_beside_it_is_left_alone(tmp_path) -> None:
    beside = subprocess.Popen(["sleep", "60"])
    threads = [threading.Thread(target=sandbox.run, args=(["-c", ""],), kwargs={"seconds": 9}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert beside.poll() is None
    beside.kill()
    beside.wait()
