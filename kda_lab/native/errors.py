"""What can go wrong between a source file and a loaded library."""

from __future__ import annotations


class BuildError(RuntimeError):
    """Building a library failed. `log` holds everything the tools printed, with paths as in csrc."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class CompilerNotFound(BuildError):
    """A tool that the build needs is missing; the message names it and the command that installs it."""


class LibraryError(RuntimeError):
    """A library cannot be loaded, is of another version of the C ABI, or failed inside."""
