"""Builds a library with CMake, once for every state of sources, flags, compilers and architecture."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kda_lab.native import cache
from kda_lab.native.compilers import Toolchain, find_toolchain
from kda_lab.native.errors import BuildError

DEVICES = ("cpu", "cuda")
_SOURCE_SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".def", ".txt", ".cmake"}
_PROGRESS_EVERY_S = 2.0


def csrc_dir() -> Path:
    """The C++ and CUDA sources: $KDA_LAB_CSRC, else inside the package (a wheel), else beside it (a checkout)."""
    asked = os.environ.get("KDA_LAB_CSRC")
    package = Path(__file__).resolve().parents[1]
    candidates = [Path(asked).absolute()] if asked else [package / "csrc", package.parent / "csrc"]
    for candidate in candidates:
        if (candidate / "CMakeLists.txt").is_file():
            return candidate
    places = " or ".join(map(str, candidates))
    raise BuildError(
        f"the kernels' sources are not there: no CMakeLists.txt in {places}. Install kda_lab again, or set "
        "KDA_LAB_CSRC to a copy of csrc."
    )


def library_name(device: str) -> str:
    return f"libkda_{device}.{'dylib' if sys.platform == 'darwin' else 'so'}"


def source_paths(csrc: Path, device: str) -> list[Path]:
    """The files that `device`'s library is made of: all of csrc but the other device's folder."""
    others = {str(csrc / other) for other in DEVICES if other != device}
    return sorted(_walk(str(csrc), others))


def _walk(folder: str, skip: set[str]) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "build" or entry.path in skip:
                continue
            if entry.is_dir():
                yield from _walk(entry.path, skip)
            elif os.path.splitext(entry.name)[1] in _SOURCE_SUFFIXES:
                yield Path(entry.path)


def build(device: str, csrc: Path | None = None) -> Path:
    """Returns the library for `device` ("cpu" or "cuda"), building it unless the cache holds it.

    Prints progress to stderr while it builds, nothing when it does not. Raises CompilerNotFound when a tool is missing
    and BuildError, with the compiler's own text, when the sources do not compile.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; expected one of {', '.join(map(repr, DEVICES))}")
    csrc = csrc or csrc_dir()
    toolchain = find_toolchain(device)
    # The snapshot has the other device's sources too: CMake wants them, this target does not compile them.
    snapshot = {path.relative_to(csrc): path.read_bytes() for path in sorted(_walk(str(csrc), set()))}
    sources = {path.relative_to(csrc) for path in source_paths(csrc, device)}
    key = _library_key({path: content for path, content in snapshot.items() if path in sources}, toolchain)
    folder = cache.cache_dir() / "libraries" / f"{device}-{key}"
    if found := cache.find(folder, library_name(device)):
        return found

    tree = cache.cache_dir() / "trees" / f"{device}-{toolchain.key()[:16]}"
    with cache.locked(tree.with_suffix(".lock"), library_name(device)) as lock:
        if found := cache.find(folder, library_name(device)):  # another process built it while this one waited
            return found
        started = time.monotonic()
        built = _compile(tree, csrc, snapshot, toolchain, lock.fileno())
        seconds = time.monotonic() - started
        facts = {
            "device": device,
            "compiler": toolchain.compiler.name,
            "architectures": toolchain.architectures,
            "seconds": round(seconds, 1),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        library = cache.publish(built, folder, facts)
        cache.say(f"built {library.name} in {seconds:.1f} s")
        for parent in (folder.parent, tree.parent):
            cache.drop_unused(parent)
    return library


def _library_key(sources: dict[Path, bytes], toolchain: Toolchain) -> str:
    digest = hashlib.sha256(toolchain.key().encode())
    for path, content in sources.items():
        digest.update(f"\0{path.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:32]


def _compile(tree: Path, csrc: Path, snapshot: dict[Path, bytes], toolchain: Toolchain, lock_fd: int) -> Path:
    """Compiles the sources in `tree`, where what did not change since the last build is not compiled again.

    They are compiled from a snapshot, so the library is made of exactly the bytes that its key names, whatever is
    edited meanwhile. A tree whose build was killed may hold half-written files: it is thrown away.
    """
    unfinished = tree / "unfinished"
    if unfinished.exists():
        shutil.rmtree(tree)
    tree.mkdir(parents=True, exist_ok=True)
    os.utime(tree)
    unfinished.touch()
    _write_snapshot(tree / "csrc", snapshot)

    device = toolchain.device
    build_dir = tree / "build"
    libraries = build_dir / "lib"
    cache.say(f"building {library_name(device)} with {toolchain.compiler.name}; the result is kept for the next time")
    configure = [toolchain.cmake, "-S", str(tree / "csrc"), "-B", str(build_dir), "-G", "Ninja"]
    configure += [*toolchain.cmake_definitions(), f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={libraries}"]
    make = [toolchain.cmake, "--build", str(build_dir), "--target", f"kda_{device}"]
    environment = {**os.environ, **toolchain.environment, "NINJA_STATUS": "[%f/%t] "}
    for command in (configure, make):
        status, log = _run(command, environment, library_name(device), lock_fd)
        log = log.replace(str(tree / "csrc"), str(csrc))
        if status:
            if command is make:
                unfinished.unlink()  # it ended in good order: what did compile can be used again
            tools = f"{library_name(device)} does not build with {toolchain.compiler.name}"
            raise BuildError(f"{tools}:\n\n{_compiler_text(log)}", log)
    unfinished.unlink()
    return libraries / library_name(device)


def _write_snapshot(folder: Path, sources: dict[Path, bytes]) -> None:
    """Makes `folder` hold exactly `sources`; a file that is right already keeps its time stamp, which Ninja goes by."""
    for path in [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder) not in sources]:
        path.unlink()
    for path, content in sources.items():
        target = folder / path
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def _run(command: list[str], environment: dict[str, str], what: str, lock_fd: int) -> tuple[int, str]:
    """Runs a command; returns its exit status and what it printed, and says every few seconds how far it is."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock_fd,),  # if this process is killed, the next one waits until its orphans are gone
        start_new_session=True,
    )
    lines = []
    started = said = time.monotonic()
    try:
        for line in process.stdout:
            lines.append(line)
            now = time.monotonic()
            progress = re.match(r"\[(\d+/\d+)\]", line)
            if progress and now - said > _PROGRESS_EVERY_S:
                cache.say(f"  {what}: {progress[1]} after {now - started:.0f} s")
                said = now
        return process.wait(), "".join(lines)
    except BaseException:  # Ctrl-C: leave no compiler running
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _compiler_text(log: str) -> str:
    """What the compilers printed, without Ninja's progress and the long commands it repeats."""
    kept, skip = [], False
    for line in log.splitlines():
        if skip:  # the command, on the line after FAILED
            skip = False
        elif line.startswith("FAILED: "):
            skip = True
        elif not re.match(r"\[\d+/\d+\] |ninja: |-- ", line):
            kept.append(line)
    return "\n".join(kept).strip()
