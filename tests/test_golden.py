"""The golden cases against the definition, the CPU steps and the rounding mirror."""

from __future__ import annotations

import golden
import numpy as np

from kda_lab import reference
from kda_lab.compare import assert_close


def test_the_definition_is_the_stored_float64(golden_case: golden.GoldenCase) -> None:
    result = reference.recurrent(golden_case.inputs)
    # Stored as float32, so that is as close as they can be.
    assert_close(result.out.astype(np.float32), golden_case.fp64_out, rms=1e-9)
    if golden_case.fp64_final_state is not None:
        assert_close(result.final_state.astype(np.float32), golden_case.fp64_final_state, rms=1e-9, name="final_state")


def test_all_cases_are_here() -> None:
    assert len(golden.names()) == 28
