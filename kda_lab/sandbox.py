"""Runs code that may crash, loop for ever or eat the memory in a process of its own, with limits.

Not a wall against malice: the process may still read and write the user's files.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STARTING = 120.0  # seconds that a process may take to import what it needs, before it sets its own limits
_TEXT = 4000  # characters of what it printed that are kept, the last ones

_SIGNALS = {
    "SIGSEGV": "it read or wrote memory that is not its own",
    "SIGBUS": "it read or wrote memory that is not there",
    "SIGFPE": "it divided an integer by zero",
    "SIGILL": "it ran an instruction that this processor does not have, or fell off the end of a function",
    "SIGABRT": "it ended itself: an exception nobody caught, or a damaged heap",
    "SIGKILL": "the system ended it, most likely for its memory",
}


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    status: int  # exit status; negative: the signal that ended it
    timed_out: bool
    seconds: float  # the limit it ran under
    text: str  # the end of what it printed

    @property
    def failure(self) -> str:
        """What went wrong in words; "" where it ended well."""
        if self.timed_out:
            return f"It did not end within {self.seconds:g} s."
        if self.status < 0:
            name = signal.Signals(-self.status).name
            return f"It crashed with {name}: {_SIGNALS.get(name, 'see what it printed')}."
        return f"It ended with status {self.status}." if self.status else ""


def run(arguments: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Runs ``python arguments...`` in a session of its own, with `env` added, and ends all that is left of it.

    The process calls :func:`limit` itself once its imports are done; `seconds` is what it allows there. What it started
    ends with it; without /proc, as on macOS, a process that moved to another session does not.
    """
    command = [sys.executable, *arguments]
    mark = f"KDA_LAB_SANDBOX_{uuid.uuid4().hex}"  # a name of its own, so that a sandbox inside a sandbox has both
    environment = {**os.environ, "PYTHONFAULTHANDLER": "0", mark: "1", **(env or {})}
    root = str(Path(__file__).resolve().parents[1])  # this kda_lab, wherever the process starts
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, env=environment, start_new_session=True
        )
        timed_out = False
        try:
            process.wait(seconds + _STARTING)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:  # also what it left behind, and also when the user interrupts
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            while _kill_marked(mark):
                time.sleep(0.01)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _TEXT))
        text = printed.read().decode(errors="replace")
    timed_out = timed_out or process.returncode == -signal.SIGALRM
    return Outcome(process.returncode, timed_out, seconds, text)


def _kill_marked(mark: str) -> bool:
    """Kills the processes that inherited this variable, also those that left the session; whether there were any."""
    found = False
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if mark.encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)
                found = True
    return found


def limit(seconds: float, megabytes: int) -> None:
    """From now on this process may run for so long and take so much more memory; no core file, no file above 1 GB.

    SIGALRM ends it, also inside compiled code. On macOS memory is not limited.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    except OSError:  # no /proc, as on macOS
        return
    most = pages * resource.getpagesize() + megabytes * 2**20
    inherited = resource.getrlimit(resource.RLIMIT_AS)[1]  # a limit may be lowered only
    most = most if inherited == resource.RLIM_INFINITY else min(most, inherited)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
