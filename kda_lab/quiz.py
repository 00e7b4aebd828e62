"""Questions at the end of a lesson, each answer with its reason. They unfold without a kernel: the book has them, too.

quiz(4)       # the questions of lesson 4
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
from pathlib import Path

from kda_lab.show import Html

# Inline, because JupyterLab strips <style> from a notebook it does not trust yet. No colours: they follow the theme.
_QUESTION = 'style="margin:1em 0 0.3em"'
_ANSWER = 'style="margin:0.3em 0 0.3em 1.5em"'
_POINTER = 'style="cursor:pointer"'
_REASON = 'style="margin:0.3em 0 0.6em 1.2em"'

_FILE = Path(__file__).parent / "data" / "quiz.json"


@dataclasses.dataclass(frozen=True)
class Answer:
    text: str
    right: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[Answer, ...]


@functools.cache
def questions() -> dict[int, tuple[Question, ...]]:
    """All questions, by the lesson's number."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    return {
        int(lesson): tuple(Question(q["question"], tuple(Answer(**a) for a in q["answers"])) for q in of_lesson)
        for lesson, of_lesson in content.items()
    }


def quiz(lesson: int) -> Html:
    """A lesson's questions. Opening an answer, with a click or Enter, says whether it is right and why.

    Raises ValueError naming the lessons that have questions.
    """
    if lesson not in questions():
        raise ValueError(f"lesson is {lesson!r}; expected one of {', '.join(map(str, questions()))}")
    asked = list(enumerate(questions()[lesson], 1))
    markup = "".join(_markup(number, question) for number, question in asked)
    return Html(f"<div>{markup}</div>", "\n\n".join(_text(number, question) for number, question in asked))


def _markup(number: int, question: Question) -> str:
    answers = "".join(
        f"<details {_ANSWER}><summary {_POINTER}>{html.escape(answer.text)}</summary>"
        f"<p {_REASON}><strong>{_verdict(answer)}</strong> {html.escape(answer.why)}</p></details>"
        for answer in question.answers
    )
    return f"<p {_QUESTION}><strong>{number}. {html.escape(question.text)}</strong></p>{answers}"


def _text(number: int, question: Question) -> str:
    """The question and its answers, the right one named at the end, for a terminal or a screen reader."""
    lines = [f"{number}. {question.text}"]
    lines += [f"   {letter}) {answer.text}" for letter, answer in zip("abcdef", question.answers)]
    lines += [f"   Answer: {letter}. {a.why}" for letter, a in zip("abcdef", question.answers) if a.right]
    return "\n".join(lines)


def _verdict(answer: Answer) -> str:
    return "Right." if answer.right else "No."
