"""Every exercise: the stub and plausible mistakes are refused, each with the hint that helps; the solution passes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import torch

from kda_lab import exercises, own_step
from kda_lab.exercises import WRITE, Wrong, lesson_00, lesson_01, lesson_02, lesson_03, lesson_05, lesson_06, tally
from kda_lab.exercises import notebook as exercise_cells
from kda_lab.tour import find_lessons

ALL = [exercise for number in exercises.LESSONS for exercise in exercises.lesson(number)]
QUICK = [exercise for exercise in ALL if exercise.id != "9.3"]  # which builds two steps


def decay_last(S, q, k, v, g, beta, scale):
    S = (S + beta * np.outer(v - S @ k, k)) * np.exp(g)
    return S, scale * S @ q


def no_delta_rule(S, q, k, v, g, beta, scale):
    S = S * np.exp(g) + beta * np.outer(v, k)
    return S, scale * S @ q


def reads_before(S, q, k, v, g, beta, scale):
    return lesson_00.one_token(S, q, k, v, g, beta, scale)[0], scale * S @ q


def nan_blind(actual, expected):
    return math.sqrt(np.nansum((actual - expected) ** 2) / np.nansum(expected**2))


def L_with(change):
    def make_L(k_hat, beta, G):
        pairs = np.einsum("id,jd,ijd->ij", k_hat, k_hat, np.exp(G[:, None] - G[None]))
        return change(pairs, beta)

    return make_L


def update_with(key):
    return lambda S, U, k_hat, G: S * np.exp(G[-1]) + U.T @ (k_hat * key(G))


def gate_half_rebased(g_raw, A_log, dt_bias, lower_bound, exp2):
    return lower_bound * math.log2(math.e) / (1 + exp2(-math.exp(A_log) * (g_raw + dt_bias)))


def gate_by_exp(g_raw, A_log, dt_bias, lower_bound, exp2):
    return lower_bound * math.log2(math.e) / (1 + np.exp(-math.exp(A_log) * (g_raw + dt_bias)))


def gate_with_another_slope(g_raw, A_log, dt_bias, lower_bound, exp2):
    log2_e = math.log2(math.e)
    return lower_bound * log2_e / (1 + exp2(-math.exp(A_log) * log2_e * (g_raw + dt_bias)))


def gate_base_e(g_raw, A_log, dt_bias, lower_bound, exp2):
    return lower_bound / (1 + np.exp(-math.exp(A_log) * (g_raw + dt_bias)))


def pairwise_Mqk(q_hat, k_hat, G, scale, exp):
    return scale * np.tril(np.einsum("id,jd,ijd->ij", q_hat, k_hat, exp(G[:, None] - G[None])))


def strict_Mqk(q_hat, k_hat, G, scale, exp):
    return np.tril(lesson_03.factored_Mqk(q_hat, k_hat, G, scale, exp), -1)


def from_the_start(G):
    return np.exp(G), np.exp(-G)


def one_factor_shifted(G):
    return np.exp(G - G[8]), np.exp(-G)


def output_with(sign, by_rows):
    def chunk_output(q_decayed, k_decayed, Mqk, INV, beta, values, S):
        P = Mqk @ (beta[:, None] * INV if by_rows else INV * beta)
        return (q_decayed + sign * P @ k_decayed) @ S.T + P @ values

    return chunk_output


def floor_with(combine):
    return lambda tokens, chunk, us, mb, tbs: combine(tokens / chunk * us, mb / tbs)


def rounds_early(S, U, k_restored, decay):
    return ((S.float() * decay).bfloat16().float() + U.T @ k_restored).bfloat16()


def all_bf16(S, U, k_restored, decay):
    return S * decay.bfloat16() + U.T.bfloat16() @ k_restored.bfloat16()


def busy_unsorted(intervals):
    busy, reached = 0.0, -math.inf
    for start, end in intervals:
        busy, reached = busy + max(0.0, end - max(start, reached)), max(reached, end)
    return busy


WRONG = {
    "0.1": [
        (lambda lb, n: n * np.exp(lb), "multiplies again"),
        (lambda lb, n: lb * n, "the gate is added up"),
        (lambda lb, n: np.exp(lb), "one token only"),
    ],
    "0.2": [
        (decay_last, "decay comes first"),
        (no_delta_rule, "delta rule"),
        (reads_before, "a token sees itself"),
        (lambda S, *rest: S, "Return two things"),
    ],
    "0.3": [
        (nan_blind, "NaN passed"),
        (lambda a, e: np.mean(np.abs((a - e) / e)), "entries near 0"),
        (lambda a, e: np.sqrt(np.mean((a - e) ** 2)), "absolute"),
    ],
    "1.1": [(lambda C, K: C * C * K, "half of the pairs"), (lambda C, K: C * (C - 1) // 2 * K, "diagonal")],
    "1.2": [
        (L_with(lambda pairs, beta: np.tril(beta[:, None] * pairs)), "diagonal belongs to I"),
        (L_with(lambda pairs, beta: np.tril(beta[None] * pairs, -1)), "belongs to the row"),
        (L_with(lambda pairs, beta: np.tril(pairs, -1)), "beta is missing"),
    ],
    "1.3": [
        (lambda L: np.eye(len(L)) - L, "first term"),
        (lambda L: lesson_01.invert(-L), "mind the sign"),
        (lambda L: np.linalg.inv(np.eye(len(L)) + L), "np.linalg.inv"),
    ],
    "1.4": [
        (update_with(lambda G: np.exp(G)), "not from the start"),
        (update_with(lambda G: 1.0), "new keys decay"),
        (update_with(lambda G: np.exp(-G)), "exponent is positive"),
    ],
    "2.1": [(lambda lb: lb * math.log(2), "the way back"), (lambda lb: lb, "still base e")],
    "2.2": [
        (gate_half_rebased, "sigmoid contains an exponential"),
        (gate_by_exp, "exp2 was never called"),
        (gate_base_e, "gate in base e"),
        (gate_with_another_slope, "one for A_log"),
    ],
    "2.3": [(lambda p, r: 1 - p + p / r, "share of the old one"), (lambda p, r: 1 - p + p * r, "times add")],
    "3.1": [(lambda C, top: top / C, "it is negative"), (lambda C, top: -top / (C - 1), "first one included")],
    "3.2": [(pairwise_Mqk, "pairwise form"), (strict_Mqk, "keep the diagonal")],
    "3.3": [(from_the_start, "as large as before"), (one_factor_shifted, "product must still be")],
    "4.1": [
        (lambda C, D: 3 * C * D + D + 2 * C * C, "those are elements"),
        (lambda C, D: 3 * C * D * 2 + D * 4 + C * C * 2, "INV and Mqk"),
    ],
    "4.2": [(lambda n, h, sms: n * h / sms, "all of them"), (lambda n, h, sms: sms / (n * h), "other way round")],
    "4.3": [
        (lambda M, N, K: (M // 16) * (N // 8) * (K // 16), "round up"),
        (lambda M, N, K: -(-M // 16) * -(-N // 16) * -(-K // 16), "steps of 8"),
    ],
    "5.1": [
        (lambda lengths, heads, chunk: (sum(lengths) // chunk * heads, len(lengths) * heads), "round up"),
        (lambda lengths, heads, chunk: lesson_05.blocks(lengths, heads, chunk)[::-1], "first is prepare"),
    ],
    "5.2": [(floor_with(lambda a, b: a + b), "overlap"), (floor_with(min), "both are")],
    "5.3": [(rounds_early, "before the sum"), (all_bf16, "computed in bf16")],
    "6.1": [
        (lambda INV, beta, k, v: (INV @ k, INV @ v), "beta is missing"),
        (lambda INV, beta, k, v: (beta[:, None] * (INV @ k), beta[:, None] * (INV @ v)), "before INV mixes"),
        (lambda INV, beta, k, v: lesson_06.wy(INV, beta, k, v)[0], "Return two arrays"),
    ],
    "6.2": [(output_with(1, False), "has a minus"), (output_with(-1, True), "columns of INV")],
    "6.3": [(lambda K, V, n: K * V * 4 // n, "those are bytes"), (lambda K, V, n: K * V // 2 // n, "would be bf16")],
    "7.1": [(lambda mb, us: us / mb, "other way round"), (lambda mb, us: 1e3 * mb / us, "Check the units")],
    "7.2": [
        (lambda m, a: "memory" if m > a else "arithmetic", "kernel waits"),
        (lambda m, a: "latency", "is near its peak"),
    ],
    "7.3": [
        (lambda ks: sum(end - start for start, end in ks), "share count once"),
        (lambda ks: max(end for _, end in ks) - min(start for start, _ in ks), "gap between"),
        (busy_unsorted, "sort them first"),
    ],
    "8.1": [
        (lambda ratio, noise: "confirmed" if ratio and ratio >= 1.15 else "refuted", "differs from itself"),
        (lambda ratio, noise: "not measured", "clearly above"),
    ],
    "8.2": [
        (lambda counts: "refuted" if counts.get(75) else "confirmed", "nothing about older"),
        (lambda counts: "confirmed" if counts.get(90) else "refuted", "there on 75"),
    ],
    "8.3": [
        (lambda gate: "clamp" if abs(gate(30.0, -5.0) + 5) < 1e-3 else "factor", "scales with lower_bound"),
        (lambda gate: "factor" if abs(gate(30.0, -5.0) + 5) < 1e-3 else "clamp", "cut off"),
    ],
    "9.1": [
        (lambda b, t, h, d, T, H, K: ((b * H + h) * T + t) * K + d, "heads of one token"),
        (lambda b, t, h, d, T, H, K: (t * H + h) * K + d, "batch row is missing"),
    ],
    "9.2": [
        (lambda errors: "none" if not any(e > 1e-2 for e in errors.values()) else "inverse", "something is lost"),
        (lambda errors: "inverse", "as small as bf16"),
    ],
    "9.3": [(lambda: 5, "Return the path"), (lambda: "no_such_step.cpp", "There is no file")],
}


def by_id(exercise):
    return exercise.id


def test_every_lesson_has_three_exercises_and_each_its_mistakes():
    assert sorted(WRONG) == sorted(exercise.id for exercise in ALL)
    for number in exercises.LESSONS:
        ids = [exercise.id for exercise in exercises.lesson(number)]
        assert ids == [f"{number}.{i}" for i in range(1, len(ids) + 1)]
        assert len(ids) >= 3
        assert any(exercise.kind == WRITE for exercise in exercises.lesson(number)) or number == 4
    assert all(len(answers) >= 2 for answers in WRONG.values())
    assert len({exercise.name for exercise in ALL}) == len(ALL)


@pytest.mark.parametrize("exercise", QUICK, ids=by_id)
def test_solution_passes_and_costs_what_it_says(exercise):
    cost = exercise.check(exercise.solution)
    if cost is not None:
        assert cost.value == pytest.approx(cost.solution)


@pytest.mark.parametrize("exercise", ALL, ids=by_id)
def test_untouched_stub_is_refused(exercise):
    namespace: dict = {}
    exec(exercise.stub, namespace)
    with pytest.raises(Wrong, match="returns nothing yet"):
        exercise.check(namespace[exercise.name])


@pytest.mark.parametrize(
    ("id", "answer", "hint"),
    [pytest.param(id, *pair, id=f"{id}-{i}") for id, pairs in WRONG.items() for i, pair in enumerate(pairs)],
)
def test_mistake_gets_the_hint_that_helps(id, answer, hint):
    with pytest.raises(Wrong, match=f"(?i){hint}"):
        exercises.get(id).check(answer)


@pytest.mark.parametrize("exercise", ALL, ids=by_id)
def test_answer_that_raises_or_is_no_function_or_no_number_is_refused(exercise):
    def answer(*args, **kwargs):
        return 1 / 0

    with pytest.raises(Wrong, match=f"{exercise.name} raised ZeroDivisionError"):
        exercise.check(answer)
    with pytest.raises(Wrong, match="expected a function"):
        exercise.check(3)
    with pytest.raises(Wrong):
        exercise.check(lambda *args, **kwargs: {"neither": "number nor array"})


@pytest.mark.parametrize("exercise", ALL, ids=by_id)
def test_stub_is_the_solution_without_its_body(exercise):
    lines = exercise.stub.splitlines()
    assert len(lines) <= 12
    assert exercise.solution_source.startswith("\n".join(lines[:-1]))
    assert inspect.getdoc(exercise.solution)
    assert exercise.hints
    assert exercise.points >= 1


def test_a_cost_says_what_it_counts_and_what_the_solution_has():
    cost = exercises.get("3.2").check(COSTS["3.2"][0])
    assert (cost.value, cost.solution) == (1.0, 2.0)
    assert str(cost) == "cost 1 exponentials for each element; the solution's is 2"


COSTS = {  # exercise: an answer that is right, and how it compares with the solution
    "0.2": (
        lambda S, q, k, v, g, beta, scale: (
            T := S * np.exp(g) + beta * np.outer(v - (S * np.exp(g)) @ k, k),
            scale * T @ q,
        ),
        "dearer",
    ),
    "1.2": (L_with(lambda pairs, beta: np.tril(beta[:, None] * pairs, -1)), "dearer"),
    "1.3": (lambda L: invert_triangle(L), "cheaper"),
    "2.2": (lesson_02.activate_gate, "equal"),
    "3.2": (lambda q, k, G, scale, exp: scale * np.tril((q * (rows := exp(G))) @ (k / rows).T), "cheaper"),
    "3.3": (lambda G: (np.exp(G - G[9]), np.exp(G[9] - G)), "dearer"),
    "6.1": (lambda INV, beta, k, v: ((INV * beta) @ k, (INV * beta) @ v), "cheaper"),
    "6.2": (
        lambda q, k, Mqk, INV, beta, v, S: q @ S.T + Mqk @ (INV @ (beta[:, None] * (v - k @ S.T))),
        "dearer",
    ),
    "8.3": (lambda gate: "clamp" if abs(gate(-2.0, -5.0) - lesson_08_clamp(-2.0)) < 1e-9 else "factor", "cheaper"),
}


def lesson_08_clamp(logit):
    return -math.log1p(math.exp(logit))


def invert_triangle(L):
    INV = np.eye(len(L))
    for i in range(1, len(L)):
        INV[i, :i] = -L[i, :i] @ INV[:i, :i]
    return INV


@pytest.mark.parametrize("id", COSTS)
def test_costs_rank_answers_that_are_right(id):
    answer, expected = COSTS[id]
    cost = exercises.get(id).check(answer)
    found = "equal" if cost.value == cost.solution else "cheaper" if cost.value < cost.solution else "dearer"
    assert found == expected, str(cost)


def test_what_has_a_cost_says_so():
    """Each is an answer that computes something; 9.3 builds steps, and its cost is tested with a stand-in."""
    with_cost = {exercise.id for exercise in QUICK if exercise.check(exercise.solution) is not None} | {"9.3"}
    assert with_cost == {*COSTS, "9.3"}
    for exercise in ALL:
        assert ("The cost is" in exercise.spec) == (exercise.id in with_cost), exercise.id


def counted(function, *arrays):
    """Operations and exponentials, as the tally counts them."""
    return tuple(
        tally._count(function, lambda watch: tuple(map(watch, arrays)), what)
        for what in (tally.OPERATIONS, tally.EXPONENTIALS)
    )


def dot_by_hand(a, b):
    total = 0.0
    for i in range(len(a)):
        total = total + a[i] * b[i]
    return total


def shrink(a):
    a *= 0.5
    a[0] -= a[1] @ np.ones((5, 5))


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda a, b: a + 2 * b, [(3, 5), (3, 5)], (30, 0)),
        (lambda a, b: a @ b, [(3, 4), (4, 5)], (120, 0)),
        (lambda a, b: np.dot(a, b), [(3, 4), (4, 5)], (120, 0)),
        (lambda a, b: np.einsum("ik,kj->ij", a, b), [(3, 4), (4, 5)], (120, 0)),
        (lambda a, b: np.einsum("id,jd,id->ij", a, b, a), [(3, 4), (5, 4)], (180, 0)),
        (lambda a, b: np.outer(a, b), [(3,), (5,)], (15, 0)),
        (lambda a: a.sum(), [(3, 5)], (15, 0)),
        (lambda a: np.sum(a, axis=0), [(3, 5)], (15, 0)),
        (lambda a: np.exp(-a)[:2] * a[:2], [(3, 5)], (10, 15)),
        (lambda a: np.tril(a.T), [(5, 5)], (0, 0)),
        (dot_by_hand, [(7,), (7,)], (14, 0)),
        (shrink, [(5, 5)], (25 + 50 + 5, 0)),
        (lambda a: [np.exp2(row[0]) for row in a], [(3, 5)], (0, 3)),
    ],
)
def test_the_tally_counts_what_is_computed(function, shapes, expected):
    assert counted(function, *(np.ones(shape) for shape in shapes)) == expected


def test_an_answer_that_cannot_be_counted_has_no_cost():
    def through_lists(L):
        return lesson_01.invert(np.array(L.tolist()))

    def by_torch(L):
        return lesson_01.invert(torch.from_numpy(L).numpy())

    for answer in (through_lists, by_torch):
        assert exercises.get("1.3").check(answer) is None


def test_mistakes_do_not_hide_behind_torch_tensors():
    assert exercises.get("4.2").check(lambda n, h, sms: torch.tensor(min(1.0, n * h / sms))) is None


def test_score_shows_and_returns_points(capsys, monkeypatch):
    assert exercises.score("2.1", lambda lb: lb) == 0.0
    shown = capsys.readouterr().out
    assert "✗ 2.1 One factor: not yet. This is still base e." in shown
    assert exercises.score("0.2", lesson_00.one_token) == 2.0
    assert "✓ 0.2" in capsys.readouterr().out
    assert {"0.2": 2.0, "2.1": 0.0}.items() <= exercises.progress().items()


def test_help_is_folded_and_the_solution_can_be_kept_back(monkeypatch):
    exercise = exercises.get("3.2")
    markup = exercises._not_yet(exercise, "a <hint>")._repr_html_()
    assert markup.count("<details>") == len(exercise.hints) + 1
    assert "a &lt;hint&gt;" in markup
    assert "<p><code>np.tril</code> keeps the diagonal.</p>" in markup
    assert "np.tril((q_hat * exp(G))" in markup
    monkeypatch.setenv("KDA_LAB_SOLUTIONS", "0")
    markup = exercises._not_yet(exercise, "hint")._repr_html_()
    assert markup.count("<details>") == len(exercise.hints)
    assert "np.tril((q_hat" not in markup


@pytest.mark.parametrize("id", ["3.9", "12.1", "x", ""])
def test_unknown_exercise_is_named(id):
    with pytest.raises(ValueError, match=r"expected"):
        exercises.get(id)


def report(**changes):
    check = own_step.Check("mixed", 2e-3, 1e-6, 6e-3)
    times = ({"step": own_step.NUMBER, "slug": "own_step", "median_ms": 100.0},)
    fields = {"path": None, "device": "cpu", "failure": "", "checks": (check,), "times": times, "machine": {}}
    return own_step.Report(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({}, "1.00 times as fast"),
        ({"failure": "It crashed with SIGSEGV"}, "SIGSEGV"),
        ({"checks": (own_step.Check("retain", 0.9, 0.9, 6e-3),)}, "not right in every regime: retain"),
    ],
)
def test_own_step_must_be_right_and_faster(monkeypatch, changes, hint):
    mine, start = own_step.example("fast"), own_step.example("start")
    monkeypatch.setattr(own_step, "run", lambda path: report() if path == start else report(**changes))
    with pytest.raises(Wrong, match=hint):
        exercises.get("9.3").check(lambda: mine)


def test_own_step_that_is_faster_passes(monkeypatch):
    mine, start = own_step.example("fast"), own_step.example("start")
    fast = report(times=({"step": own_step.NUMBER, "slug": "own_step", "median_ms": 20.0},))
    monkeypatch.setattr(own_step, "run", lambda path: report() if path == start else fast)
    cost = exercises.get("9.3").check(lambda: mine)
    assert dataclasses.astuple(cost) == (0.2, 0.2, "of the starting file's time")


def test_own_step_is_compared_with_the_solution(monkeypatch, tmp_path):
    times = {"mine.cpp": 10.0, "fast.cpp": 20.0, "start.cpp": 100.0}

    def run(path):
        return report(times=({"step": own_step.NUMBER, "slug": "own_step", "median_ms": times[path.name]},))

    (tmp_path / "mine.cpp").touch()
    monkeypatch.setattr(own_step, "run", run)
    cost = exercises.get("9.3").check(lambda: tmp_path / "mine.cpp")
    assert (cost.value, cost.solution) == (0.1, 0.2)


def test_importing_a_lesson_needs_no_compiler():
    code = "import sys; from kda_lab import exercises, native; exercises.lesson(9); assert native.loaded('cpu') is None"
    subprocess.run([sys.executable, "-c", code], check=True)


NOTEBOOKS = find_lessons()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lessons_carry_their_exercises(path):
    """Stubs and checks in the notebooks are those of the package: python -m kda_lab.exercises.notebook renews them."""
    notebook = nbformat.read(path, as_version=4)
    renewed = copy.deepcopy(notebook)
    exercise_cells.insert(renewed, int(path.name[:2]))
    assert notebook == renewed


def run_exercises(path, solved: bool) -> dict[str, float]:
    """Points of a lesson's exercises when its exercise cells are run as they are, or with the solutions in them."""
    notebook = nbformat.read(path, as_version=4)
    if solved:
        exercise_cells.solve(notebook)
    namespace = {"own_step": own_step}
    exercises._progress.clear()
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.id.startswith("exercise-") and "exercise-9-3" not in cell.id:
            exec(cell.source, namespace)
    return exercises.progress()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lessons_are_red_with_stubs_and_green_with_solutions(path):
    expected = {exercise.id: exercise.points for exercise in QUICK if exercise.lesson == int(path.name[:2])}
    assert run_exercises(path, solved=False) == dict.fromkeys(expected, 0.0)
    assert run_exercises(path, solved=True) == expected


@pytest.mark.slow
def test_the_fast_example_solves_the_last_exercise():
    exercise = exercises.get("9.3")
    cost = exercise.check(exercise.solution)
    assert 0 < cost.value == cost.solution < 1 / 2


class _EqualToEverything(float):
    __hash__ = float.__hash__

    def __eq__(self, other):
        return True


@pytest.mark.parametrize("value", [_EqualToEverything(), {}, np.zeros(3), torch.zeros(3, requires_grad=True), "x"])
@pytest.mark.parametrize("exercise", QUICK, ids=by_id)
def test_an_answer_of_a_strange_kind_is_wrong(exercise, value):
    with pytest.raises(Wrong):
        exercise.check(lambda *args, **kwargs: value)


@pytest.mark.parametrize("exercise", ALL, ids=by_id)
def test_hints_are_plain_text_with_code(exercise):
    """They are shown as HTML, where a formula in dollars would stay as it is written."""
    for hint in exercise.hints:
        assert "$" not in hint
        assert hint.count("`") % 2 == 0
