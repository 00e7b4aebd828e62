"""The quizzes: every lesson has questions, every question one right answer, every answer a reason."""

from __future__ import annotations

import re

import pytest

from kda_lab.quiz import questions, quiz


def test_every_lesson_has_three_to_five_questions():
    assert sorted(questions()) == list(range(10))
    assert all(3 <= len(of_lesson) <= 5 for of_lesson in questions().values())


@pytest.mark.parametrize("lesson", questions())
def test_every_question_has_one_right_answer_and_reasons(lesson):
    for question in questions()[lesson]:
        assert sum(answer.right for answer in question.answers) == 1, question.text
        assert len({answer.text for answer in question.answers}) == len(question.answers) >= 2
        assert all(len(answer.why) > 10 for answer in question.answers), question.text


def test_the_right_answer_has_no_favourite_place():
    at = [[a.right for a in q.answers].index(True) for of_lesson in questions().values() for q in of_lesson]
    assert len(set(at)) > 1
    assert max(map(at.count, set(at))) < 0.8 * len(at)


def test_answers_unfold_without_a_kernel_and_say_in_words_whether_they_are_right():
    shown = quiz(3)
    answers = [answer for question in questions()[3] for answer in question.answers]
    assert len(re.findall("<details[^>]*><summary", shown.markup)) == len(answers)
    assert shown.markup.count("<strong>Right.</strong>") == len(questions()[3])
    assert shown.markup.count("<strong>No.</strong>") == len(answers) - len(questions()[3])


def test_the_text_form_names_the_right_answer():
    first = questions()[3][0]
    right = next(i for i, answer in enumerate(first.answers) if answer.right)
    assert f"Answer: {'abcdef'[right]}. {first.answers[right].why}" in repr(quiz(3))


def test_an_unknown_lesson_is_named():
    with pytest.raises(ValueError, match="lesson is 10; expected one of 0, 1, 2"):
        quiz(10)
