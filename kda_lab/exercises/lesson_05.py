"""Exercises of lesson 5: two kernels, and what rounding costs."""

from __future__ import annotations

import torch

from kda_lab.exercises.exercise import COUNT, MEASURE, WRITE, Exercise, Wrong, expect, expect_close


def blocks(lengths, heads, chunk):
    """Blocks of prepare and of recurrence, as a tuple, for sequences of these lengths."""
    return sum(-(-length // chunk) for length in lengths) * heads, len(lengths) * heads


def _judge_blocks(answer) -> None:
    result = answer([100, 32], 4, 16)
    expect(isinstance(result, tuple) and len(result) == 2, "Return two numbers: of prepare, and of recurrence.")
    expect_close(
        result,
        (36, 8),
        {
            "The first is prepare, which runs in parallel over chunks.": (8, 36),
            "A sequence's last chunk may be a part of one: round up.": (32, 8),
            "A block handles one head, too.": (9, 2),
            "Chunks do not reach across sequences, so each sequence rounds up by itself. (And here the recurrence has "
            "one block for each sequence and head.)": (36, 4),
            "The recurrence goes through a sequence's chunks one after another: one block for all of them.": (36, 36),
        },
        "prepare: one block for each chunk and head; recurrence: one for each sequence and head.",
    )
    expect_close(answer([17, 17], 1, 16), (4, 2), {"Chunks do not reach across sequences.": (3, 2)}, "Round up each.")


def recurrence_floor_us(tokens, chunk, us_per_chunk, megabytes, terabytes_per_s):
    """The shortest time of the recurrence in microseconds: it waits for memory, or for its own chain of chunks."""
    return max(tokens / chunk * us_per_chunk, megabytes / terabytes_per_s)


def _judge_floor(answer) -> None:
    for tokens, expected in ((8192, 8192 / 16 * 0.5), (512, 100.0)):
        chain, memory = tokens / 16 * 0.5, 400 / 4.0
        expect_close(
            answer(tokens, 16, 0.5, 400.0, 4.0),
            expected,
            {
                "The two overlap: while one chunk is computed the next is fetched. The longer one decides.": chain
                + memory,
                "The longer one decides: nothing is done before both are.": min(chain, memory),
                "A chain has one link for each chunk, not for each token.": tokens * 0.5,
            },
            "Two bounds: chunks times the time of one, and bytes over bandwidth. (1 MB at 1 TB/s is 1 microsecond.)",
        )


def next_state(S, U, k_restored, decay):
    """The bf16 state [V, K] after a chunk, rounded once: S is bf16; U [C, V], k_restored [C, K], decay [K] are fp32."""
    return (S.float() * decay + U.T @ k_restored).bfloat16()


def _judge_state(answer) -> None:
    torch.manual_seed(0)
    S, U, k, decay = torch.randn(8, 8).bfloat16(), torch.randn(16, 8), torch.randn(16, 8), torch.rand(8)
    exact = S.float() * decay + U.T @ k
    result = answer(S.clone(), U, k, decay)
    expect(isinstance(result, torch.Tensor), "Return a torch tensor.")
    expect(result.dtype == torch.bfloat16, f"The state is kept in bf16; the result is {result.dtype}.")
    if torch.equal(result, exact.bfloat16()):
        return
    twice = ((S.float() * decay).bfloat16().float() + U.T @ k).bfloat16()
    expect(not torch.equal(result, twice), "The decayed state was rounded before the sum: that is a rounding too many.")
    parts = (S.float() * decay).bfloat16() + (U.T @ k).bfloat16()
    expect(not torch.equal(result, parts), "Both terms were rounded before the sum, and the sum again.")
    low = S * decay.bfloat16() + U.T.bfloat16() @ k.bfloat16()
    expect(not torch.equal(result, low), "All of it was computed in bf16: go to fp32 first, and round at the end.")
    raise Wrong("S diag(decay) + U^T k_restored in fp32, then one rounding to bf16.")


EXERCISES = (
    Exercise(
        "5.1",
        "Two grids",
        COUNT,
        "`prepare` runs one block for each chunk and head, `recurrence` one for each sequence and head. Count them for "
        "packed sequences.",
        blocks,
        _judge_blocks,
        ("Each sequence rounds up by itself.", "Heads multiply both."),
    ),
    Exercise(
        "5.2",
        "Memory or chain",
        MEASURE,
        "The recurrence of one head goes from chunk to chunk, and it must move its bytes. Which of the two bounds "
        "its time?",
        recurrence_floor_us,
        _judge_floor,
        ("MB divided by TB/s gives microseconds.", "Copies for the next chunk run while this one is computed."),
    ),
    Exercise(
        "5.3",
        "One rounding",
        WRITE,
        "The published kernel keeps its state in bf16 and rounds it once a chunk. Write that update in torch: one "
        "rounding, at the end.",
        next_state,
        _judge_state,
        ("`S.float()` first.", "`.bfloat16()` last."),
    ),
)
