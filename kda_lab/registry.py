"""The ladder of steps, as the compiled libraries report it (csrc/steps.def is the only list)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from kda_lab import native

_SUFFIX = {"cpu": ".cpp", "cuda": ".cu"}
_PART_SUFFIX = {"cpu": ".h", "cuda": ".cuh"}


@dataclass(frozen=True)
class Step:
    """One rung of the ladder. `chunks` and `exponent_budget` have an entry for each device whose library is loaded."""

    number: int
    slug: str
    title: str
    idea: str
    devices: tuple[str, ...]  # "cpu", "cuda": where the step exists
    compute_capability: int  # the only one it runs on, on CUDA: 90 for 9.0; 0: 8.0 and newer
    chunks: dict[str, tuple[int, ...]]  # chunk sizes in tokens; empty where the step has no chunks
    exponent_budget: dict[str, float]  # largest |lower_bound| * chunk it can represent; 0: no such limit
    sources: dict[str, tuple[Path, ...]]  # its file in csrc, then the parts it includes from the folder of its name

    @property
    def name(self) -> str:
        """Its address in file names, NVTX ranges and plots, such as "5_fused_two_kernel"."""
        return f"{self.number}_{self.slug}"


def steps() -> tuple[Step, ...]:
    """All steps in order. Builds the CPU library if need be, never the CUDA one: its facts are there once loaded."""
    libraries = [native.load("cpu"), *filter(None, [native.loaded("cuda")])]
    reports = {library.device: {step.number: step for step in library.steps} for library in libraries}
    csrc = native.csrc_dir()
    ladder = []
    for step in libraries[0].steps:
        here = {device: report[step.number] for device, report in reports.items() if device in step.devices}
        ladder.append(
            Step(
                number=step.number,
                slug=step.slug,
                title=step.title,
                idea=step.idea,
                devices=step.devices,
                compute_capability=step.compute_capability,
                chunks={device: reported.chunks for device, reported in here.items()},
                exponent_budget={device: reported.exponent_budget for device, reported in here.items()},
                sources={device: _sources(csrc, device, step) for device in step.devices},
            )
        )
    return tuple(ladder)


def _sources(csrc: Path, device: str, step: native.LibraryStep) -> tuple[Path, ...]:
    folder = csrc / device / "steps"
    return (folder / f"{step.name}{_SUFFIX[device]}", *sorted((folder / step.name).glob(f"*{_PART_SUFFIX[device]}")))


def get(step: int | str | Step | None, device: str = "cpu") -> Step:
    """Returns the step with this number (5 or "5"), slug or name; None: the best one for `device`.

    Raises ValueError when there is no such step, or not on this device; the message lists those there are.
    """
    return find(steps(), step, device, capability() if device == "cuda" and step is None else 0)


def capability(gpu: int | None = None) -> int:
    """Compute capability of a GPU, torch's current one by default: 90 for 9.0; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability(gpu)
    return 10 * major + minor


AnyStep = TypeVar("AnyStep", Step, native.LibraryStep)


def find(ladder: Sequence[AnyStep], step: int | str | Step | None, device: str, capability: int = 0) -> AnyStep:
    """`get` on a given list of steps, for a GPU of this compute capability."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; expected 'cpu' or 'cuda'")
    here = [candidate for candidate in ladder if device in candidate.devices]
    if step is None:
        return [candidate for candidate in here if candidate.compute_capability in (0, capability)][-1]
    asked = str(step.number if isinstance(step, Step) else step)
    for candidate in ladder:
        if asked in (str(candidate.number), candidate.slug, candidate.name):
            if candidate not in here:
                only = " and ".join(candidate.devices)
                raise ValueError(
                    f"step {candidate.name} runs on {only}, not on {device}; steps for {device}: {_listed(here)}"
                )
            return candidate
    raise ValueError(f"step is {step!r}; expected None (the best for the device) or one of {_listed(ladder)}")


def _listed(ladder: Sequence[AnyStep]) -> str:
    return ", ".join(f'{step.number} or "{step.slug}"' for step in ladder)
