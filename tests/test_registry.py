"""The ladder: steps.def, the compiled library and `kda_lab.steps()` are one list."""

from __future__ import annotations

import re

import pytest

import kda_lab
from kda_lab import native, registry


def steps_def() -> list[tuple[str, ...]]:
    """The ten fields of every KDA_STEP line, as steps.def names them."""
    text = (native.csrc_dir() / "steps.def").read_text()
    code = "\n".join(line for line in text.splitlines() if not line.startswith("//"))
    field = r'\s*([^,"]+?|"[^"]*")\s*'
    return re.findall(rf"KDA_STEP\({','.join([field] * 10)}\)", code)


def chunks(written: str) -> tuple[int, ...]:
    return tuple(int(number) for number in written.split("|") if int(number))


def test_steps_are_those_of_steps_def():
    written = steps_def()
    assert len(written) >= 6
    assert len(written) == len(kda_lab.steps())
    for line, step in zip(written, kda_lab.steps(), strict=True):
        number, slug, devices, cpu_chunks, _, capability, cpu_budget, _, title, idea = line
        assert step.compute_capability == (int(capability) if "cuda" in step.devices else 0)
        assert (step.number, step.slug) == (int(number), slug)
        assert (step.title, step.idea) == (title.strip('"'), idea.strip('"'))
        assert step.devices == tuple(d for d in ("cpu", "cuda") if f"KDA_DEVICE_{d.upper()}" in devices)
        assert step.name == f"{number}_{slug}"
        if "cpu" in step.devices:
            assert step.chunks["cpu"] == chunks(cpu_chunks)
            assert step.exponent_budget["cpu"] == float(cpu_budget)
        else:
            assert "cpu" not in step.chunks


def test_numbers_count_up_from_zero():
    assert [step.number for step in kda_lab.steps()] == list(range(len(kda_lab.steps())))


def test_every_step_of_the_cpu_has_its_one_source_file():
    for step in kda_lab.steps():
        if "cpu" in step.devices:
            assert step.sources["cpu"][0].is_file()
            assert [path.name for path in step.sources["cpu"]] == [f"{step.name}.cpp"]
    named = {step.sources["cpu"][0].name for step in kda_lab.steps() if "cpu" in step.devices}
    assert {path.name for path in (native.csrc_dir() / "cpu" / "steps").iterdir()} == named


@pytest.mark.parametrize("asked", [3, "3", "factored", "3_factored"])
def test_get(asked):
    step = registry.get(asked)
    assert step.number == 3
    assert registry.get(step) == step


def test_get_none_is_the_best_of_the_device():
    assert registry.get(None, "cpu").number == 5
    assert registry.get(None, "cuda").compute_capability in (0, registry.capability())


@pytest.mark.parametrize("asked", [17, -1, "", "factor", "3_", 2.5, True])
def test_get_what_is_not_there(asked):
    with pytest.raises(
        ValueError, match=re.escape(f'step is {asked!r}; expected None (the best for the device) or one of 0 or "')
    ):
        registry.get(asked)


def test_get_on_the_wrong_device():
    with pytest.raises(ValueError, match=r"4_fused_one_kernel runs on cuda, not on cpu; steps for cpu: 0 or .*, 5 or"):
        registry.get("fused_one_kernel")
    assert registry.get("fused_one_kernel", "cuda").number == 4


def test_the_best_step_is_one_that_this_gpu_runs():
    steps = registry.steps()
    hopper_only = [step.number for step in steps if step.compute_capability == 90]
    assert registry.find(steps, None, "cuda", 90).number == steps[-1].number
    assert registry.find(steps, None, "cuda", 80).number == max(
        step.number for step in steps if "cuda" in step.devices and step.number not in hopper_only
    )
