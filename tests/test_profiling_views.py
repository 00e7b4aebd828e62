"""What is shown of a profile: numbers in plain words, rooflines, figures and their alt text, from reports made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_lab.profiling import figures, metrics, roofline, sass_view, table, timeline
from kda_lab.profiling.explorer import timeline_explorer
from kda_lab.profiling.ncu import Launch, Report
from kda_lab.profiling.timeline import Span
from kda_lab.sass import Kernel

CEILINGS = {"copy_bytes_per_s": 4e12, "bf16_flops_per_s": 8e14, "fp32_flops_per_s": 5e13, "exponentials_per_s": 4e12}


def launch(kernel: str, time_ns: float, read: float, written: float, **more: float) -> Launch:
    measured = {
        "gpu__time_duration.sum": time_ns,
        "dram__bytes_read.sum": read,
        "dram__bytes_write.sum": written,
        "launch__registers_per_thread": 40.0,
        "smsp__inst_executed_pipe_xu.sum": 1e6,
        "sm__warps_active.avg.pct_of_peak_sustained_active": 60.0,
        "sm__maximum_warps_per_active_cycle_pct": 75.0,
        "launch__occupancy_limit_registers": 12.0,
        "launch__occupancy_limit_shared_mem": 6.0,
        metrics._STALL.format("long_scoreboard"): 5.0,
        metrics._STALL.format("barrier"): 2.0,
    }
    return Launch(kernel, f"void kda::{kernel}(Args)", ("5_fused_two_kernel",), measured | more, {})


def report(*launches: Launch) -> Report:
    return Report(Path("report.ncu-rep"), launches)


def kernel_code(name: str, spill_store_bytes: int, *instructions: str) -> Kernel:
    return Kernel(name, name, instructions, 40, 0, spill_store_bytes, 0, 0)


TWO = report(launch("prepare", 200e3, 300e6, 100e6), launch("recurrence", 100e3, 200e6, 0.0))


def test_summary_says_in_words_and_units_what_was_measured():
    rows = {row["raw"]: row for row in metrics.summary(TWO)}
    time = rows["gpu__time_duration.sum"]
    assert (time["what"], time["unit"], time["prepare"], time["recurrence"]) == ("time on the GPU", "µs", 200.0, 100.0)
    assert rows["dram__bytes_read.sum"]["prepare"] == 300.0  # MB
    assert rows["lts__t_sector_hit_rate.pct"]["prepare"] is None  # not in the report: not measured


def test_kernels_have_their_share_of_the_copy_bandwidth():
    first, second = metrics.kernels(TWO, CEILINGS["copy_bytes_per_s"])
    assert first["share_of_copy"] == pytest.approx(400e6 / 200e-6 / 4e12)
    assert second["share_of_copy"] == pytest.approx(0.5)
    bare = metrics.kernels(TWO)[0]
    assert bare["share_of_copy"] is bare["spill_bytes"] is None
    spilling = kernel_code("prepare", 24, "STL")
    assert metrics.kernels(TWO, code={"prepare": spilling})[0]["spill_bytes"] == 24


def test_stalls_and_occupancy_name_what_holds_a_kernel_back():
    assert list(metrics.stalls(TWO, "prepare").items()) == [
        ("data from device memory or L2", 5.0),
        ("other warps, at a block barrier", 2.0),
    ]
    occupancy = metrics.occupancy(TWO, "prepare")
    assert (occupancy["reached"], occupancy["possible"], occupancy["limited_by"]) == (60.0, 75.0, "shared memory")
    bare = report(Launch("prepare", "prepare", (), {}, {}))
    assert metrics.stalls(bare, "prepare") == {}
    assert metrics.occupancy(bare, "prepare")["limited_by"] is None


def test_comparison_has_a_column_for_each_step_and_none_where_a_kernel_is_not():
    one = report(launch("forward", 400e3, 100e6, 50e6))
    rows = metrics.comparison({"4": one, "5": TWO})
    found = {(row["raw"], row["kernel"]): (row["4"], row["5"]) for row in rows}
    assert found["gpu__time_duration.sum", "forward"] == (400.0, None)
    assert found["gpu__time_duration.sum", "recurrence"] == (None, 100.0)


def test_a_roofline_point_adds_the_kernels_and_all_their_launches():
    at = roofline.point("5", report(*TWO.launches, launch("recurrence", 100e3, 200e6, 0.0)), flops=8e10)
    assert at.time_s == pytest.approx(400e-6)
    assert at.bytes == pytest.approx(800e6)
    assert at.intensity == pytest.approx(100.0)
    assert at.flops_per_s == pytest.approx(2e14)
    assert at.exponentials == pytest.approx(3 * 32e6)
    assert roofline.floors(at, CEILINGS) == pytest.approx(
        {"memory": 200e-6, "tensor cores": 100e-6, "CUDA cores": 1.6e-3, "exponentials": 24e-6}
    )
    unknown = report(Launch("prepare", "prepare", (), {}, {}))
    assert roofline.point("5", unknown, flops=1.0) is None


def spans() -> list[Span]:
    return [
        Span("5_fused_two_kernel", "range", "thread 1", 0, 60),
        Span("prepare", "range", "thread 1", 5, 20),
        Span("cudaLaunchKernel", "launch", "thread 1", 6, 12, correlation=1),
        Span("prepare", "kernel", "GPU 0, stream 7", 15, 65, correlation=1),
        Span("recurrence", "kernel", "GPU 0, stream 7", 70, 100),
    ]


def test_figures_state_their_finding():
    found = timeline.build("nsys", "NVIDIA H200", spans())
    at = roofline.point("5", TWO, flops=8e10)
    drawn = {
        "2 kernels take 80% of it; prepare takes most, 50 µs in 1 launches": figures.timeline_figure(found),
        "5 does 267 TFLOP/s at 133 operations a byte, 50% of the copy bandwidth": figures.roofline_figure(
            [at], CEILINGS
        ),
        "5 takes 2 times its floor by memory": figures.floors_figure([at], CEILINGS),
        "in 5, warps mostly wait for data from device memory": figures.stall_figure({"5": TWO}, "prepare"),
        "prepare of 5 reaches 60 %, limited by shared memory": figures.occupancy_figure({"5": TWO}),
    }
    for finding, fig in drawn.items():
        assert finding in fig.alt
        fig.canvas.draw()  # with every label laid out


def test_the_floor_by_cuda_cores_counts_until_it_is_broken():
    at, fast = (roofline.point("5", TWO, flops) for flops in (8e9, 2e10))  # floors of 160 and 400 µs; it took 300
    assert "5 takes 1.88 times its floor by CUDA cores" in figures.floors_figure([at], CEILINGS).alt
    assert "5 takes 2 times its floor by memory" in figures.floors_figure([fast], CEILINGS).alt


def test_a_kernel_that_mostly_issues_is_said_to():
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    busy = report(launch("prepare", 200e3, 0, 0, **{stall.format("selected"): 9.0}))
    assert "in 5, no wait is longer than the issuing" in figures.stall_figure({"5": busy}, "prepare").alt


def test_figures_of_nothing_say_not_measured():
    for fig in (
        figures.roofline_figure([], CEILINGS),
        figures.floors_figure([], CEILINGS),
        figures.stall_figure({}, "prepare"),
        figures.occupancy_figure({}),
    ):
        assert fig.alt.endswith("not measured.")
        fig.canvas.draw()


def test_the_explorer_zooms_by_slider_and_button():
    explorer = timeline_explorer(timeline.build("nsys", "NVIDIA H200", spans()))
    whole = explorer.picture.value
    button = next(button for button in explorer.zooms if button.description == "recurrence")
    button.click()
    assert explorer.interval.value == pytest.approx((67.0, 100.0))
    assert "1 kernels" in explorer.status.value
    assert explorer.picture.value != whole
    explorer.interval.value = (0.0, 10.0)
    assert "no kernel on the GPU" in explorer.status.value


def test_machine_code_side_by_side_marks_the_exponential_and_ignores_registers():
    exp = kernel_code("gate", 0, "FFMA.SAT R3, R0, 0.0057, R5", "FMUL R4, R4, R5", "@P0 MUFU.EX2 R4, R4", "EXIT")
    ex2 = kernel_code("gate", 0, "MUFU.EX2 R9, R9", "EXIT")
    shown = sass_view.side_by_side(exp, ex2, ("naive_exp", "rebased_ex2"))
    caption, *lines = repr(shown).splitlines()
    assert "naive_exp: 4 instructions, 2 of the exponential, 40 registers" in caption
    assert "rebased_ex2: 2 instructions, 1 of the exponential" in caption
    assert any(line.startswith("- ▸ FFMA.SAT R3") for line in lines)
    assert any(line.startswith("  ▸ @P0 MUFU.EX2 R4, R4") and "MUFU.EX2 R9, R9" in line for line in lines)
    assert "FFMA.SAT" in shown._repr_html_()


@pytest.mark.cuda_compiler
def test_machine_code_of_a_step_is_chosen_by_kernel():
    shown = sass_view.of_steps(1, 2, kernel="gate")
    assert repr(shown).startswith("1: gate<16>: ")  # the smallest chunk
    assert "▸ FFMA.SAT" in repr(shown)
    with pytest.raises(ValueError, match="no kernel 'gates'; it has gate<16>"):
        sass_view.of_steps(1, kernel="gates")


@pytest.mark.parametrize(
    ("full", "instance"),
    [("void kda::step1::gate<(int)16>(Args)", "gate<16>"), ("kda::step0::recurrence(Args<3>)", "recurrence")],
)
def test_kernels_of_reports_are_found_in_the_machine_code(full, instance):
    assert table.instance_name(full) == instance


def test_no_two_steps_look_alike_on_the_roofline():
    points = [roofline.Point(f"step {i}", 1e-3, 1e9, 1e11, 1e9) for i in range(7)]
    looks = [(line.get_color(), line.get_marker()) for line in figures.roofline_figure(points, CEILINGS).axes[0].lines]
    assert len({look for look in looks if look[1] != "None"}) == len(points)


def test_a_timeline_counts_only_what_lies_in_the_interval():
    long, short = Span("long", "kernel", "GPU", 0.0, 90.0), Span("short", "kernel", "GPU", 90.0, 130.0)
    text = figures.describe_timeline(timeline.build("nsys", None, [long, short]), 80.0, 120.0)
    assert "short takes most, 30 µs in 1 launches" in text
    assert "take 100% of it" in text
