"""Exercises of lesson 6: the WY form and the state in registers."""

from __future__ import annotations

import numpy as np

from kda_lab.exercises import tally
from kda_lab.exercises.exercise import COUNT, WRITE, Cost, Exercise, expect, expect_close, random


def _chunk():
    C, K, V = 5, 4, 3
    INV = np.linalg.inv(np.eye(C) + np.tril(0.3 * random(C, C), -1))
    beta, k_decayed, values = np.linspace(0.2, 0.9, C), random(C, K, seed=1), random(C, V, seed=2)
    q_decayed, Mqk, S = random(C, K, seed=3), np.tril(random(C, C, seed=4)), random(V, K, seed=5)
    return INV, beta, k_decayed, values, q_decayed, Mqk, S


def wy(INV, beta, k_decayed, values):
    """w [C, K] and u [C, V], so that U = u - w S^T: what of the correction does not wait for the state."""
    return INV @ (beta[:, None] * k_decayed), INV @ (beta[:, None] * values)


def _judge_wy(answer) -> Cost | None:
    INV, beta, k, v, *_ = _chunk()
    result = answer(INV, beta, k, v)
    expect(isinstance(result, tuple) and len(result) == 2, "Return two arrays: w and u.")
    b = beta[:, None]
    for name, actual, x in (("w", result[0], k), ("u", result[1], v)):
        expect_close(
            actual,
            INV @ (b * x),
            {
                f"{name}: beta is missing.": INV @ x,
                f"{name}: beta scales the rows before INV mixes them.": b * (INV @ x),
                f"{name}: INV is missing.": b * x,
            },
            f"{name} is not right: INV times (beta times the rows).",
        )
    INV, beta, k, v = np.tril(random(16, 16)), random(16), random(16, 32), random(16, 32)
    arguments = (INV, beta, k, v)
    return tally.cost(answer, wy, lambda watch: tuple(map(watch, arguments)), "operations a token", per=16)


def chunk_output(q_decayed, k_decayed, Mqk, INV, beta, values, S):
    """The output [C, V] of a chunk without U: q' S^T + P V, where only the first product waits for the state S."""
    P = Mqk @ (INV * beta)
    return (q_decayed - P @ k_decayed) @ S.T + P @ values


def _judge_output(answer) -> Cost | None:
    INV, beta, k, v, q, Mqk, S = _chunk()
    P = Mqk @ (INV * beta)
    by_rows = Mqk @ (beta[:, None] * INV)
    expect_close(
        answer(q, k, Mqk, INV, beta, v, S),
        q @ S.T + Mqk @ (INV @ (beta[:, None] * (v - k @ S.T))),
        {
            "beta scales the columns of INV, since it multiplies what comes in: INV diag(beta).": (q - by_rows @ k)
            @ S.T
            + by_rows @ v,
            "The correction of the query has a minus: what the keys recall is taken off the values.": (q + P @ k) @ S.T
            + P @ v,
            "The query must lose what its keys recall: q' = q_decayed - P k_decayed.": q @ S.T + P @ v,
            "Only P is there: the part that reads the state is missing.": P @ v,
            "beta is missing.": (q - Mqk @ INV @ k) @ S.T + Mqk @ INV @ v,
        },
        "Start from O = q_decayed S^T + Mqk U and U = INV beta (V - k_decayed S^T), and collect what multiplies S^T.",
    )
    INV, Mqk, beta, S = np.tril(random(16, 16)), np.tril(random(16, 16)), random(16), random(32, 32)
    q, k, v = random(16, 32), random(16, 32), random(16, 32)
    return tally.cost(
        answer,
        chunk_output,
        lambda watch: (q, k, Mqk, INV, beta, v, watch(S)),
        "operations that wait for the state, for each entry of the output",
        per=v.size,
    )


def registers_a_thread(K, V, threads):
    """32-bit registers a thread needs to hold its part of an fp32 state [V, K] that a block of threads shares."""
    return K * V // threads


def _judge_registers(answer) -> None:
    expect_close(
        answer(128, 128, 256),
        64,
        {
            "Those are bytes: a register holds one fp32.": 256,
            "That would be bf16; an fp32 fills a register.": 32,
            "That is the whole state; the threads share it.": 16384,
        },
        "Elements of the state divided by threads.",
    )
    expect_close(answer(128, 64, 128), 64, {}, "Half of the value columns on half of the threads is the same share.")


EXERCISES = (
    Exercise(
        "6.1",
        "What need not wait",
        WRITE,
        "Split the correction $U$ into a part that knows the state and one that does not: $U = u - w S^{\\top}$. The "
        "cost is the number of operations.",
        wy,
        _judge_wy,
        ("U = INV (beta (V - k_decayed S^T)).", "Multiply out."),
    ),
    Exercise(
        "6.2",
        "An output that does not wait for U",
        WRITE,
        "With $P = M^{qk}\\,\\mathrm{INV}\\,\\mathrm{diag}(\\beta)$ the output needs no $U$: $O = q' S^{\\top} + P V$. "
        "Find $q'$ and write it. The cost is the number of operations that wait for $S$.",
        chunk_output,
        _judge_output,
        ("`INV * beta` scales columns, `beta[:, None] * INV` rows.", "Everything that multiplies S^T makes q'."),
        points=2,
    ),
    Exercise(
        "6.3",
        "Does it fit?",
        COUNT,
        "Step 6 keeps the fp32 state in registers from the first chunk to the last. How many does a thread need? A "
        "thread has at most 255, and needs some for all else.",
        registers_a_thread,
        _judge_registers,
        ("A register holds 32 bits.", "Splitting V over two blocks also halves the threads or the registers."),
    ),
)
