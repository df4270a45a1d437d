# SPDX-License-Identifier: Apache-2.0
"""docs/faults-tested.md: every id has its row, and every test that a row names exists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "faults-tested.md"

CASES = """C25 C26 C28 C29 C30 C31 C33 C34 C35 C36 C38 C39 C40 C42 C43 C44 C45 C46 C48 C73
C98 C99 C103 C104 C106 C107 C109 C110
C111 C112 C114 C116 C117 C118 C119 C120 C121"""
FAULTS = [f"F{number}" for number in (*range(1, 26), 27, 28, *range(30, 43))]


def rows() -> list[list[str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    found = [re.split(r" *\| *", line.strip("| ")) for line in lines]
    return [cells for cells in found if re.fullmatch(r"[CF]\d+", cells[0])]


def named_tests() -> Iterable[tuple[str, str]]:
    for identity, _, tests, _ in rows():
        for name in re.findall(r"`([^`]+)`", tests):
            yield identity, name


def test_every_case_and_fault_has_one_row() -> None:
    got, want = [cells[0] for cells in rows()], [*CASES.split(), *FAULTS]
    assert got == want, f"got {set(got) ^ set(want)} missing, twice or out of order"


@pytest.mark.parametrize(("identity", "name"), sorted(set(named_tests())))
def test_a_test_that_is_named_exists(identity: str, name: str) -> None:
    path, _, function = name.partition("::")
    file = ROOT / path
    assert file.is_file(), f"got no {path}, which {identity} names"
    text = file.read_text(encoding="utf-8")
    assert re.search(rf"^def {function}\(", text, re.M), f"got no {function} in {path}"


def test_every_row_has_a_test() -> None:
    bare = [cells[0] for cells in rows() if "`" not in cells[2]]
    assert not bare, f"got {bare} without a test, want one"


def runs_in_vm(name: str) -> bool:
    """Return whether `make test-vm` runs a test: it is of a suite that does, and not `host`."""
    path, _, function = name.partition("::")
    if not path.startswith(("tests/bpf/", "tests/netns/")):
        return False
    text = (ROOT / path).read_text(encoding="utf-8")
    module_marks = re.search(r"^pytestmark = (\[.*?^\]|[^\n]*)", text, re.M | re.S)
    decorators = re.search(rf"((?:^(?:@|[ )]).*\n)*)^def {function}\(", text, re.M)
    marks = (module_marks[0] if module_marks else "") + (decorators[1] if decorators else "")
    return "pytest.mark.host" not in marks


def test_what_runs_in_both_places_has_a_test_that_does() -> None:
    wrong = [
        cells[0]
        for cells in rows()
        if cells[3].startswith("both")
        and not any(runs_in_vm(name) for name in re.findall(r"`([^`]+)`", cells[2]))
    ]
    assert not wrong, f"got {wrong} said to run in the virtual machines too, want where they run"
