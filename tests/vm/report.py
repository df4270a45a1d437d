# SPDX-License-Identifier: Apache-2.0
"""Counts of test runs: read from JUnit reports, and summed into a closing line like pytest's.

    python -m tests.vm.report CLOSING-LINE REPORT…

prints the sum of a run's closing line and of reports of other runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

_WORDS = {"error": "errors", "warning": "warnings"}
_ORDER = (
    *("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "errors"),
)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many tests came to which end, and how long the run took."""

    passed: int
    failed: int
    errors: int
    skipped: int
    seconds: float


def read_report(path: Path) -> Counts | None:
    """Return the counts of a JUnit report; None where there is none, or half of one."""
    try:
        suite = ET.parse(path).getroot().find("testsuite")
    except (FileNotFoundError, ET.ParseError):
        return None
    if suite is None:
        return None
    total, failed, errors, skipped = (
        int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    )
    seconds = float(suite.get("time", "0"))
    return Counts(max(total - failed - errors - skipped, 0), failed, errors, skipped, seconds)


def sum_counts(counts: Sequence[Counts]) -> Counts:
    """Return the counts of several runs as one."""
    return Counts(
        *(sum(getattr(one, name) for one in counts) for name in ("passed", "failed")),
        *(sum(getattr(one, name) for one in counts) for name in ("errors", "skipped", "seconds")),
    )


def sum_line(closing: str, reports: list[Counts | None]) -> str:
    """Return a closing line for everything; a missing report counts as one error."""
    counts: dict[str, int] = {}
    for number, word in re.findall(r"(\d+) ([a-z]+)", closing):
        name = _WORDS.get(word, word)
        if name in _ORDER:
            counts[name] = counts.get(name, 0) + int(number)
    match = re.search(r" in ([0-9.]+)s", closing)
    seconds = float(match[1]) if match else 0.0
    for report in reports:
        found = report or Counts(0, 0, 1, 0, 0.0)
        for name in ("passed", "failed", "errors", "skipped"):
            counts[name] = counts.get(name, 0) + int(getattr(found, name))
        seconds += found.seconds
    words = []
    for name in _ORDER:
        number = counts.get(name, 0)
        if number:
            words.append(
                f"{number} {name.rstrip('s') if number == 1 and name[-1] == 's' else name}"
            )
    text = f" {', '.join(words) or 'no tests ran'} in {seconds:.2f}s "
    return text.center(80, "=")


if __name__ == "__main__":
    print(sum_line(sys.argv[1], [read_report(Path(name)) for name in sys.argv[2:]]))
