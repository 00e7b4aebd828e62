"""Exercises of lesson 7: reading what a profiler says."""

from __future__ import annotations

from kda_lab.exercises.exercise import MEASURE, READ, WRITE, Exercise, expect_choice, expect_close


def terabytes_per_s(megabytes, microseconds):
    """Bandwidth in TB/s of a kernel that moved so many MB in so many microseconds."""
    return megabytes / microseconds


def _judge_bandwidth(answer) -> None:
    expect_close(
        answer(1260.0, 625.0),
        2.016,
        {
            "Check the units: MB per microsecond is TB per second, with no factor left.": 2016.0,
            "That is GB for TB, or the other way round: MB per microsecond is TB per second.": 0.002016,
            "That is the other way round: bytes over time.": 625.0 / 1260.0,
        },
        "Bytes over time: 10^6 bytes over 10^-6 seconds.",
    )


LIMITS = ("memory", "arithmetic", "latency")


def limited_by(memory_share, arithmetic_share):
    """What limits a kernel, by the shares of each peak that it reaches: "memory", "arithmetic", or else "latency".

    A kernel that reaches less than half of both peaks waits for something else: call that latency.
    """
    if max(memory_share, arithmetic_share) < 0.5:
        return "latency"
    return "memory" if memory_share > arithmetic_share else "arithmetic"


def _judge_limit(answer) -> None:
    cases = [
        (0.85, 0.40, "memory", "Memory is near its peak: it is the limit."),
        (0.30, 0.90, "arithmetic", "Arithmetic is near its peak: it is the limit."),
        (0.20, 0.09, "latency", "Neither peak is near. The larger share is not a limit: the kernel waits."),
        (0.09, 0.20, "latency", "Neither peak is near. The larger share is not a limit: the kernel waits."),
    ]
    for memory, arithmetic, expected, hint in cases:
        expect_choice(answer(memory, arithmetic), expected, LIMITS, dict.fromkeys(LIMITS, hint))


def busy_us(intervals):
    """Microseconds in which at least one kernel ran, from (start, end) of each kernel in any order."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def _judge_busy(answer) -> None:
    expect_close(
        answer([(0.0, 10.0), (20.0, 25.0)]),
        15.0,
        {"That is from the first start to the last end: the gap between is idle.": 25.0},
        "Two kernels one after another: add up what they take.",
    )
    expect_close(
        answer([(0.0, 10.0), (5.0, 12.0)]),
        12.0,
        {"The two overlap: the microseconds they share count once.": 17.0},
        "Kernels that overlap: count every microsecond once.",
    )
    expect_close(
        answer([(5.0, 6.0), (0.0, 10.0), (20.0, 21.0)]),
        11.0,
        {
            "The kernels come in any order: sort them first.": 6.0,
            "A kernel inside another one adds nothing.": 12.0,
            "A kernel inside another one takes nothing away.": 7.0,
        },
        "One kernel lies inside another, and they are not sorted.",
    )


EXERCISES = (
    Exercise(
        "7.1",
        "A bandwidth",
        MEASURE,
        "Nsight Compute says how many bytes a kernel moved and how long it took. Turn them into TB/s.",
        terabytes_per_s,
        _judge_bandwidth,
        ("Mega is 10^6, micro is 10^-6, tera is 10^12.",),
    ),
    Exercise(
        "7.2",
        "What limits it",
        READ,
        "Two of the report's shares tell you most: of the memory's peak and of the arithmetic's. Turn them into a "
        "finding.",
        limited_by,
        _judge_limit,
        (
            "First ask whether either is near its peak.",
            "A kernel with a long chain of dependent steps reaches neither.",
        ),
    ),
    Exercise(
        "7.3",
        "Busy time",
        WRITE,
        "From a timeline's kernels compute how long the GPU was busy. Kernels may overlap, and there may be gaps.",
        busy_us,
        _judge_busy,
        ("Sort by start.", "Keep the latest end seen so far; only what lies beyond it is new."),
        points=2,
    ),
)
