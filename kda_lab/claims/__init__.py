"""The ledger of published claims about this kernel: each measured, judged, and shown with its number and machine.

    claims.evaluate(15)           # one Finding
    claims.ledger()               # all of them, in order
    claims.export(findings)       # a dictionary for JSON: machine, date and rows

A number that needs a GPU comes from the recording that ships with the package; where that lacks it, from claims.json in
the same folder, which ``kda-lab claims --json`` wrote on that GPU. What neither has is "not measured".
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kda_lab import bench
from kda_lab.claims import base2, design, lower_bound  # noqa: F401 (each enters its claims)
from kda_lab.claims.claim import (
    CONDITIONAL,
    CONFIRMED,
    ENTERED,
    NOT_MEASURED,
    REFUTED,
    VERDICTS,
    Claim,
    Evidence,
    Finding,
    Judgement,
)
from kda_lab.profiling import recorded

__all__ = [
    "CLAIMS",
    "CONDITIONAL",
    "CONFIRMED",
    "NOT_MEASURED",
    "REFUTED",
    "VERDICTS",
    "Claim",
    "Evidence",
    "Finding",
    "Judgement",
    "evaluate",
    "export",
    "format_table",
    "ledger",
    "summary",
]

CLAIMS = dict(sorted(ENTERED.items()))
"""Every claim by its number, in order."""

COLUMNS = {
    "number": "Claim",
    "claim": "What is claimed",
    "verdict": "Verdict",
    "because": "What was found",
    "condition": "True if",
    "source": "Where the numbers come from",
}
"""For kda_lab.show.table."""


def evaluate(number: int) -> Finding:
    """Measures and judges one claim. Raises ValueError for a number that is not in the ledger."""
    if number not in CLAIMS:
        raise ValueError(f"claim is {number!r}; expected a number from 1 to {max(CLAIMS)}")
    claim = CLAIMS[number]
    evidence = claim.measure()
    if claim.missing(evidence):
        evidence = _recorded_evidence(number) or evidence
    return claim.settle(evidence)


def ledger(numbers: Iterable[int] | None = None, progress: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """Evaluates the claims with these numbers, by default all, in order. About half a minute on a laptop."""
    findings = []
    for number in sorted(CLAIMS) if numbers is None else numbers:
        progress(f"claim {number}")
        findings.append(evaluate(number))
    return findings


def summary(findings: Iterable[Finding]) -> dict[str, int]:
    """How many findings there are of each verdict."""
    counts = Counter(finding.verdict for finding in findings)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def export(findings: Iterable[Finding]) -> dict[str, Any]:
    """The ledger as a dictionary for JSON, with the machine it was evaluated on."""
    rows = [dataclasses.asdict(finding) for finding in findings]
    return {"machine": bench.machine(bench.default_device()), "claims": rows}


def format_table(findings: Sequence[Finding]) -> str:
    """The ledger as plain text, a paragraph a claim."""
    blocks = []
    for finding in findings:
        lines = [f"{finding.number:>2}  {finding.claim}", f"    {finding.verdict.upper()}: {finding.because}"]
        if finding.condition:
            lines.append(f"    True if: {finding.condition}")
        lines.append(f"    [{finding.source}]")
        blocks.append("\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in lines))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in summary(findings).items())
    return "\n\n".join([*blocks, counts])


def _recorded_evidence(number: int) -> Evidence | None:
    """What claims.json of the recording says about a claim."""
    recording = recorded.load()
    path = recording and recording.folder / "claims.json"
    if not path or not path.exists() or path.stat().st_size == 0:  # empty: a shell redirects this very ledger into it
        return None
    content = recording.claims()
    for row in content["claims"] if content else ():
        if row["number"] == number:
            return Evidence(row["numbers"], tuple(f"{source} ({recording.label})" for source in row["sources"]))
    return None
