"""What a claim is: a text, a measurement that returns numbers, and a judgement that turns numbers into a verdict.

The two are apart, so that a test can hand a judgement numbers that nobody measured and see the verdict turn.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

CONFIRMED = "confirmed"
REFUTED = "refuted"
CONDITIONAL = "true only under a condition"
NOT_MEASURED = "not measured"
VERDICTS = (CONFIRMED, REFUTED, CONDITIONAL, NOT_MEASURED)

Number = float | int | None


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Numbers by what they say, None where one could not be measured, and where they come from."""

    numbers: Mapping[str, Number]
    sources: tuple[str, ...]  # "measured on <processor>, <date>", "recorded on <GPU>, <date>", "read in <file>, <date>"


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A verdict, the finding in a sentence, and what would make the claim true ("" where nothing would, or it is)."""

    verdict: str
    because: str
    condition: str = ""


def confirmed(because: str, condition: str = "") -> Judgement:
    return Judgement(CONFIRMED, because, condition)


def refuted(because: str, condition: str = "") -> Judgement:
    return Judgement(REFUTED, because, condition)


def unsettled(because: str) -> Judgement:
    """There are numbers, but what disturbs this machine is larger than what they would have to show."""
    return Judgement(NOT_MEASURED, because)


def conditional(because: str, condition: str) -> Judgement:
    return Judgement(CONDITIONAL, because, condition)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the ledger."""

    number: int
    topic: str
    claim: str
    verdict: str
    because: str
    condition: str
    numbers: Mapping[str, Number]
    sources: tuple[str, ...]

    @property
    def numbers_text(self) -> str:
        """The numbers as "name value, name value"."""
        return ", ".join(f"{name.replace('_', ' ')} {_text(value)}" for name, value in self.numbers.items())

    @property
    def source(self) -> str:
        return "; ".join(dict.fromkeys(self.sources))  # each once


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published claim, how it is measured and how it is judged.

    The parameters of ``judge`` name the numbers it needs; those with a default may be missing.
    """

    number: int
    topic: str
    text: str
    measure: Callable[[], Evidence]
    judge: Callable[..., Judgement]

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the numbers without which there is no verdict."""
        parameters = inspect.signature(self.judge).parameters.values()
        return tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty)

    def missing(self, evidence: Evidence) -> list[str]:
        return [name for name in self.needed if evidence.numbers.get(name) is None]

    def settle(self, evidence: Evidence) -> Finding:
        """The finding that follows from these numbers; "not measured" where one that is needed is missing."""
        missing = self.missing(evidence)
        if missing:
            names = ", ".join(name.replace("_", " ") for name in missing)
            judgement = Judgement(NOT_MEASURED, f"Not measured here, and no recording has it: {names}.")
        else:
            known = inspect.signature(self.judge).parameters
            judgement = self.judge(**{name: value for name, value in evidence.numbers.items() if name in known})
        return Finding(
            number=self.number,
            topic=self.topic,
            claim=self.text,
            verdict=judgement.verdict,
            because=judgement.because,
            condition=judgement.condition,
            numbers=evidence.numbers,
            sources=evidence.sources,
        )


ENTERED: dict[int, Claim] = {}


def claim(number: int, topic: str, text: str, measure: Callable[[], Evidence]) -> Callable[[Any], Any]:
    """Enters the decorated judgement into the ledger under a number."""

    def enter(judge: Callable[..., Judgement]) -> Callable[..., Judgement]:
        ENTERED[number] = Claim(number, topic, text, measure, judge)
        return judge

    return enter


def _text(value: Number) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return f"{int(value):,}"
    return f"{value:.3g}" if math.isfinite(value) else str(value)
