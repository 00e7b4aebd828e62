"""The lessons as they ran, and the book of them: made once, looked at by many tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kda_lab import bench, book, tour


def executed(path: Path) -> tour.Lesson:
    """A lesson as it last ran, if nothing that its results depend on changed since; else as it runs now."""
    return tour.kept(path) or tour.execute_and_keep(path)


@dataclasses.dataclass(frozen=True)
class Book:
    lessons: list[tour.Lesson]
    folder: Path
    warnings: str

    @property
    def pages(self) -> list[Path]:
        return sorted(self.folder.rglob("*.html"))

    def page(self, name: str) -> str:
        return (self.folder / f"{name}.html").read_text(encoding="utf-8")


def make_book(folder: Path) -> Book:
    """The book of all lessons, with a ladder of one row."""
    lessons = [executed(path) for path in tour.find_lessons()]
    row = bench.Row(0, "token_by_token", "cpu", 1, 64, 4, 128, 128, 16, None, 1e-3, (2.0, 3.0), 10, 10, 0.1)
    index, warnings = book.write(lessons, [row], tour.notebooks_dir().parent / "docs", folder)
    return Book(lessons, index.parent, warnings)
