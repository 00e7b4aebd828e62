"""Whatever is passed for whichever argument, the error names it and says what is expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kda_lab import compare, make_inputs, native, numeric_range, ops, reference, registry, rounding

INPUTS = make_inputs(T=4, H=1, K=8, V=8)
TENSOR = torch.zeros(3)

# Functions, and a good call of each.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "make_inputs": (
        make_inputs,
        {"B": 1, "T": 4, "H": 1, "K": 8, "V": 8, "regime": "mixed", "lower_bound": -5.0, "seed": 0, "scale": None}
        | {"seq_lens": None, "initial_state": None, "key_correlation": None, "device": "cpu"},
    ),
    "Inputs.chunks": (INPUTS.chunks, {"chunk": 16}),
    "Inputs.to": (INPUTS.to, {"device": "cpu"}),
    "reference.recurrent": (reference.recurrent, {"inputs": INPUTS}),
    "reference.recurrent_torch": (reference.recurrent_torch, {"inputs": INPUTS, "device": None}),
    "reference.chunked": (reference.chunked, {"inputs": INPUTS, "chunk": 16}),
    "rounding.forward": (rounding.forward, {"inputs": INPUTS, "chunk": 16}),
    "registry.get": (registry.get, {"step": 5, "device": "cpu"}),
    "ops.forward": (
        ops.forward,
        {"inputs": INPUTS, "step": 5, "chunk": 16, "device": None, "allow_unsafe": False, "precise": False},
    ),
    "ops.fwd": (
        ops.fwd,
        {**{key: value for key, value in vars(INPUTS).items() if key != "scale"}, "scale": 1.0, "out": INPUTS.new_out()}
        | {"final_state": None, "step": 5, "allow_unsafe": False, "precise": False},
    ),
    "ops.check_lower_bound": (ops.check_lower_bound, {"lower_bound": -5.0, "chunk": 16, "device": "cpu"}),
    "ops.lower_bound_limit": (ops.lower_bound_limit, {"step": 5, "chunk": 16, "device": "cpu"}),
    "native.load": (native.load, {"device": "cpu"}),
    "native.build": (native.build, {"device": "cpu"}),
    "numeric_range.explore": (
        numeric_range.explore,
        {"lower_bound": -5.0, "chunk": 16, "dtype": "bf16", "A_log": 0.0, "dt_bias": 0.0, "gate": "saturated"},
    ),
    "compare.compare": (compare.compare, {"actual": TENSOR, "expected": TENSOR}),
    "compare.assert_close": (partial(compare.assert_close, rms=1.0), {"actual": TENSOR, "expected": TENSOR}),
}
WRONG = [None, "a", b"a", "", -1, 0, 1.5, math.nan, math.inf, 10**30, [], [1, 2], {}, object(), TENSOR, True]
UNNAMED = {"compare.compare", "compare.assert_close"}  # both sides are alike: the message says what it cannot compare


@pytest.mark.parametrize(("name", "argument"), [(name, key) for name, (_, good) in CALLS.items() for key in good])
def test_a_wrong_argument_is_named_with_what_is_expected(name: str, argument: str) -> None:
    function, good = CALLS[name]
    refused = 0
    for wrong in WRONG:
        try:
            function(**{**good, argument: wrong})
        except (TypeError, ValueError) as error:
            refused += 1
            text = str(error)
            assert "expected" in text or "runs 16" in text, (wrong, text)
            assert re.match(rf"{argument}(\[\d+\])? (is|has) ", text) or name in UNNAMED, (wrong, text)
    assert refused


STRANGE = {
    "q": [None, 3, "q", INPUTS.q.float().numpy(), INPUTS.q[0], INPUTS.q.float().to_sparse()],
    "v": [[INPUTS.v], INPUTS.v[..., None], torch.quantize_per_tensor(INPUTS.v.float(), 0.1, 0, torch.qint8)],
    "beta": [None, [1]],
    "A_log": [0.0],
    "initial_state": [3, torch.nested.nested_tensor([torch.zeros(8, 8)])],
    "cu_seqlens": [[0, 4], (0, 4)],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize(
    "run", [ops.forward, reference.recurrent, reference.recurrent_torch, reference.chunked, rounding.forward]
)
def test_a_strange_tensor_is_named(run: Callable[..., Any], name: str) -> None:
    for strange in STRANGE[name]:
        with pytest.raises((TypeError, ValueError), match=rf"^{name} (is|has) .*; expected"):
            run(INPUTS.with_(**{name: strange}))


@pytest.mark.parametrize(
    ("seq_lens", "message"),
    [
        ((3, -1), r"seq_lens\[1\] is -1; expected a whole number, 0 or more"),
        ((3, 1.5), r"seq_lens\[1\] is 1.5; expected a whole number"),
        (("3",), r"seq_lens\[0\] is '3'; expected a whole number"),
    ],
)
def test_a_wrong_length_is_named(seq_lens: tuple, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make_inputs(seq_lens=seq_lens)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    for call in (lambda: make_inputs(device="cuda"), lambda: INPUTS.to("cuda:1")):
        with pytest.raises(ValueError, match=r"device is cuda(:1)?; torch finds no GPU here: .*kda-lab doctor"):
            call()
