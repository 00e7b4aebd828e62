"""Exercises of lesson 4: one fused kernel on tensor cores."""

from __future__ import annotations

from kda_lab.exercises.exercise import COUNT, READ, Exercise, expect_close


def intermediate_bytes(chunk, D):
    """Bytes that separate kernels pass on for one chunk and head.

    k_decayed, q_decayed and k_restored [chunk, D] in bf16, the chunk's decay [D] in fp32, INV and Mqk
    [chunk, chunk] in bf16.
    """
    return 3 * chunk * D * 2 + D * 4 + 2 * chunk * chunk * 2


def _judge_bytes(answer) -> None:
    C, D = 16, 128
    expect_close(
        answer(C, D),
        3 * C * D * 2 + D * 4 + 2 * C * C * 2,
        {
            "Those are elements; a bf16 has 2 bytes and an fp32 has 4.": 3 * C * D + D + 2 * C * C,
            "bf16 has 2 bytes, not 4.": 3 * C * D * 4 + D * 4 + 2 * C * C * 4,
            "The decay is one fp32 for each channel: 4 bytes.": 3 * C * D * 2 + D * 2 + 2 * C * C * 2,
            "There are two matrices [chunk, chunk]: INV and Mqk.": 3 * C * D * 2 + D * 4 + C * C * 2,
        },
        "Add up the tensors of the docstring: elements times bytes of an element.",
    )


def busy_share(sequences, heads, multiprocessors):
    """The share of the multiprocessors that have work when one block computes all of a (sequence, head)."""
    return min(1.0, sequences * heads / multiprocessors)


def _judge_busy(answer) -> None:
    expect_close(
        answer(1, 96, 132),
        96 / 132,
        {
            "That is the other way round: blocks divided by multiprocessors.": 132 / 96,
            "That counts blocks, not a share.": 96,
            "More multiprocessors than blocks: some of them idle.": 1.0,
        },
        "How many blocks are there, and on how many multiprocessors can they run?",
    )
    expect_close(
        answer(8, 96, 132),
        1.0,
        {
            "No more than all of them can be busy.": 8 * 96 / 132,
            "Every sequence has its own blocks.": 96 / 132,
        },
        "With eight sequences there are more blocks than multiprocessors.",
    )


def mma_instructions(M, N, K):
    """How many mma.sync m16n8k16 one warp issues for a product [M, K] x [K, N]; parts of a tile count as a whole."""
    return -(-M // 16) * -(-N // 8) * -(-K // 16)


def _judge_mma(answer) -> None:
    expect_close(
        answer(16, 16, 128),
        16,
        {
            "A tile is 16 x 8 x 16: N is covered in steps of 8.": 8,
            "K is covered in steps of 16 as well: each instruction adds 16 products.": 2,
            "Those are multiply-adds; one instruction does 16 x 8 x 16 of them.": 16 * 16 * 128,
        },
        "Tiles in M, times tiles in N, times tiles in K.",
    )
    expect_close(
        answer(17, 8, 16),
        2,
        {"A part of a tile costs a whole one: round up.": 1, "Count whole instructions: round up.": 17 / 16},
        "17 rows do not fit one tile of 16.",
    )


EXERCISES = (
    Exercise(
        "4.1",
        "What need not travel",
        COUNT,
        "Between separate kernels every intermediate goes through device memory. How many bytes of them are there for "
        "one chunk and head, if they have step 5's formats, which the docstring lists? Step 4 keeps all of them on "
        "chip; steps 1 to 3 pass on more, because theirs are fp32.",
        intermediate_bytes,
        _judge_bytes,
        ("Three tensors have C · D elements.", "Two have C · C."),
    ),
    Exercise(
        "4.2",
        "Who has work?",
        COUNT,
        "One kernel that does everything for a (sequence, head) has as many blocks as there are such pairs. What share "
        "of a GPU's multiprocessors has work?",
        busy_share,
        _judge_busy,
        ("A block runs on one multiprocessor.", "A share cannot exceed 1."),
    ),
    Exercise(
        "4.3",
        "Tensor cores by the tile",
        READ,
        "`mma.sync.m16n8k16` multiplies a 16 x 16 by a 16 x 8 matrix. How many does a product need? Check your answer "
        "against $k_{decayed} k_{inv}^{\\top}$ at chunk 16.",
        mma_instructions,
        _judge_mma,
        ("m, n and k are the sizes of one tile.", "`-(-a // b)` rounds up."),
    ),
)
