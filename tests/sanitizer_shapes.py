"""Every CUDA step on small shapes, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck python tests/sanitizer_shapes.py

The shapes cover tails, batches, packed sequences with empty ones, and states of both dtypes. Set
PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own and a step beyond its end is seen.

Reports that are known (step 6, CUDA 13.0, H200): memcheck and synccheck have none. racecheck has 12, all in the variant
in which the two CTAs of a head are a cluster and share their copies, and all of one kind: a stage of the ring is filled
while the chunk before is read from it, though both sides meet at the stage's barrier. The same 12 come from a build in
which a cluster's CTAs copy everything themselves and never touch each other, so that all arrivals and bytes are a CTA's
own; launched without clusters, the same barriers give no report. So the tool does not follow barriers in a cluster.
initcheck reports copies of results to the host if --kernel-name leaves out torch's kernels, which wrote them.
"""

from __future__ import annotations

import itertools
import sys

import torch

from kda_lab import native, ops, registry
from kda_lab.inputs import make_inputs

SHAPES = (
    {"B": 1, "T": 1, "H": 1},
    {"B": 2, "T": 13, "H": 3, "initial_state": "fp32"},
    {"B": 1, "H": 2, "seq_lens": (0, 11, 5)},
    {"B": 1, "T": 16, "H": 120},  # one chunk each, but too many heads for one kernel
    {"B": 2, "T": 37, "H": 3, "initial_state": "fp32"},
    {"B": 1, "T": 80, "H": 2, "initial_state": "bf16"},
    {"B": 1, "H": 2, "seq_lens": (0, 16, 17, 0, 5), "initial_state": "fp32"},
    {"B": 1, "H": 1, "seq_lens": (33, 31)},
    {"B": 1, "H": 20, "seq_lens": (0, 140, 23)},  # halves of heads that share their copies, on 132 multiprocessors
    {"B": 1, "H": 400, "seq_lens": (0, 40, 23)},  # more heads than CTAs on the chip: a persistent kernel goes round
)
VARIANTS = (  # of kernels; step 6 has one for each
    {"lower_bound": -1.2, "precise": False},
    {"lower_bound": -1.2, "precise": True},
    {"lower_bound": -8.0, "precise": False},
    {"lower_bound": -8.0, "precise": True},
)


def main(steps: list[str]) -> None:
    native.load("cuda")  # from here on the registry knows the chunk sizes of CUDA steps
    for step in registry.steps():
        if "cuda" not in step.devices or (steps and str(step.number) not in steps):
            continue
        for chunk in step.chunks.get("cuda") or (16,):
            for shape, variant in itertools.product(SHAPES, VARIANTS if step.number == 6 else VARIANTS[:1]):
                inputs = make_inputs(**shape, regime="mixed", lower_bound=variant["lower_bound"], device="cuda")
                out = ops.forward(inputs, step=step.number, chunk=chunk, precise=variant["precise"]).out
                torch.cuda.synchronize()
                assert out.isfinite().all(), f"step {step.name}, chunk {chunk}, {shape}, {variant}: not finite"
            print(f"step {step.name}, chunk {chunk}: {len(SHAPES)} shapes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
