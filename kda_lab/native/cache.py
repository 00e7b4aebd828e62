"""Where built libraries live, and how processes share them.

    <cache>/libraries/<key>/libkda_cpu.so, built.json    published by one rename, never changed afterwards
    <cache>/trees/<toolchain key>/csrc, build            a snapshot of the sources and CMake's tree
    <cache>/trees/<toolchain key>.lock                   held while that tree is used
    <cache>/lessons/<key of the notebook's path>.lock    held while that lesson runs (kda_lab.tour)

A library's key covers sources, flags, compilers and architecture, so a library that is there is the right one. Its
SHA-256 in built.json is checked before it is loaded: a file that a full disk or a crash damaged is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kda_lab.native.errors import BuildError

_KEEP_UNUSED_S = 30 * 24 * 3600


def say(text: str) -> None:
    print(f"kda_lab: {text}", file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """$KDA_LAB_CACHE, else kda_lab in $XDG_CACHE_HOME or ~/.cache; a private temporary folder if it is not writable."""
    return _writable_cache(os.environ.get("KDA_LAB_CACHE"), os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))


@functools.lru_cache
def _writable_cache(cache: str | None, xdg: str | None, home: str | None) -> Path:
    try:
        wanted = Path(cache) if cache else (Path(xdg) if xdg else Path.home() / ".cache") / "kda_lab"
        wanted = wanted.absolute()
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        folder = _private_temporary_folder()
        say(f"cannot write the cache folder ({error}); using {folder}. Set KDA_LAB_CACHE to keep what is built.")
        return folder


def _private_temporary_folder() -> Path:
    """The same folder for every process of this user, and nobody else's: libraries are loaded from it."""
    folder = Path(tempfile.gettempdir()) / f"kda_lab-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="kda_lab-"))


@contextlib.contextmanager
def locked(path: Path, waiting_for: str) -> Iterator[BinaryIO]:
    """Holds the lock on `path`, one process at a time; the kernel releases it when its last holder dies.

    Yields the open file, for a child process to inherit: the lock then outlives this process for as long as the child.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is building {waiting_for}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            raise BuildError(
                f"{path} cannot be locked ({error}): set KDA_LAB_CACHE to a folder on a local disk"
            ) from error
        yield file


def find(folder: Path, name: str) -> Path | None:
    """The library `name` published in `folder`; None if there is none or it is damaged."""
    library = folder / name
    try:
        expected = json.loads((folder / "built.json").read_text())["sha256"]
        if sha256(library) == expected:
            os.utime(folder)  # "used": see drop_unused
            return library
        damage = "its bytes are not those that were built"
    except FileNotFoundError:
        if not folder.exists():
            return None
        damage = "a file is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage = str(error)
    say(f"the cached {name} is damaged ({damage}); building it again")
    return None


def publish(built: Path, folder: Path, facts: dict[str, object]) -> Path:
    """Puts a copy of `built` and what is known of it into `folder`, all at once or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".publish-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        shutil.copy2(built, new)
        (new / "built.json").write_text(json.dumps({"sha256": sha256(built), **facts}, indent=1))
        if folder.exists():  # damaged; a process that loaded it before keeps its mapping
            os.rename(folder, Path(temporary) / "old")
        os.rename(new, folder)
    return folder / built.name


def drop_unused(parent: Path) -> None:
    """Removes what nobody used for a month: every edit of a kernel leaves a library behind."""
    for entry in parent.iterdir():
        with contextlib.suppress(OSError):
            if entry.is_dir() and time.time() - entry.stat().st_mtime > _KEEP_UNUSED_S:
                shutil.rmtree(entry, ignore_errors=True)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
