# SPDX-License-Identifier: Apache-2.0
"""The audit log on a disk that is full: a real one, of 4 MB, in a mount namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.host,
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is missing"),
]

_PRELUDE = """
import contextlib, json, os, sys
from pathlib import Path
from shapeagent.model.errors import FailedError
from shapeagent.service.identity.audit import Audit, AuditEntry
folder = Path(sys.argv[1])
log = folder / "audit.jsonl"
def entry(number, **more):
    return AuditEntry("w", "admin", "p", "/a.B/C", request_id=str(number), **more)
def fill():
    with open(folder / "ballast", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
def refused(act):
    try:
        act()
    except FailedError as error:
        return error.reference
    return None
def ids():
    found = []
    for path in (*sorted(folder.glob("audit.jsonl.[0-9]"), reverse=True), log):
        found += [json.loads(line)["request_id"] for line in path.read_text().splitlines()]
    return found
"""


def run(body: str, tmp_path: Path) -> dict[str, object]:
    """Run Python where `tmp_path` is a tmpfs of 4 MB; return the object that it prints."""
    mount = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"),
            *(str(tmp_path), sys.executable, _PRELUDE + body),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()), "the tmpfs was mounted over the host's folder"
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_a_change_that_is_under_way_has_its_line_and_the_next_is_refused(tmp_path: Path) -> None:
    got = run(
        """
audit = Audit(log)
audit.record(entry("before"))
under_way = [audit.begin(entry(n)) for n in range(40)]
fill()
began = 40
while refused(lambda: under_way.append(audit.begin(entry(began)))) is None:
    began += 1  # what room was set aside beforehand is used
refusal = refused(lambda: audit.begin(entry("refused")))
for number, ticket in enumerate(under_way):
    ticket.end(entry(number, old="o" * 2500, new="n" * 2500, why="w" * 1000))
(folder / "ballast").unlink()
audit.record(entry("after"))
audit.close()
print(json.dumps({"began": began, "refusal": refusal, "ids": ids()}))
""",
        tmp_path,
    )
    began = got["began"]
    assert isinstance(began, int)
    assert 40 <= began <= 80, f"got {began} changes let through, want no more than have room"
    assert got["refusal"] == "audit-unwritable"
    assert got["ids"] == ["before", *map(str, range(began)), "after"]


def test_rotation_on_a_full_disk_loses_nothing_that_it_should_keep(tmp_path: Path) -> None:
    got = run(
        """
audit = Audit(log, most_bytes=20_000, kept=2)
for number in range(20):
    audit.record(entry(number, why="w" * 1000))
fill()
number = 20
while refused(lambda: audit.record(entry(number, why="w" * 1000))) is None and number < 2000:
    number += 1
stuck = audit.facts().error
(folder / "ballast").unlink()
for more in range(number, number + 40):
    audit.record(entry(more, why="w" * 1000))
error = audit.facts().error
audit.close()
print(json.dumps({"number": number, "stuck": stuck, "error": error, "ids": ids()}))
""",
        tmp_path,
    )
    number = got["number"]
    assert isinstance(number, int)
    assert number < 2000, "want the disk to be full at last"
    assert got["stuck"] is not None
    assert got["error"] is None
    ids = got["ids"]
    assert isinstance(ids, list)
    assert ids == [str(one) for one in range(int(ids[0]), number + 40)], "want no gap"


def test_a_start_on_a_full_disk_refuses_changes_until_it_is_not(tmp_path: Path) -> None:
    got = run(
        """
audit = Audit(log)
audit.record(entry("before"))
audit.begin(entry("under way"))
audit._pending.close()  # as if it was killed
audit._file.close()
with open(log, "ab") as file:
    file.write(b'{"cut')
fill()
audit = Audit(log)
first = refused(lambda: audit.begin(entry("refused")))
audit.tick()
between = ids()
(folder / "ballast").unlink()
audit.tick()
ticket = audit.begin(entry("after"))
ticket.end(entry("after"))
audit.close()
Audit(log).close()
print(json.dumps({"first": first, "between": between, "ids": ids()}))
""",
        tmp_path,
    )
    assert got["first"] == "audit-unwritable"
    assert got["between"] == ["before"]
    assert got["ids"] == ["before", "", "under way", "after"]


def test_a_disk_that_is_full_from_the_start_is_told_by_the_facts(tmp_path: Path) -> None:
    got = run(
        """
fill()
audit = Audit(log)
refusals = [refused(act) for act in (
    lambda: audit.begin(entry("a")),
    lambda: audit.record(entry("b")),
)]
facts = audit.facts()
(folder / "ballast").unlink()
audit.record(entry("c"))
print(json.dumps({"refusals": refusals, "failures": facts.failures, "error": facts.error,
                  "after": audit.facts().error, "ids": ids()}))
""",
        tmp_path,
    )
    assert got["refusals"] == ["audit-unwritable"] * 2
    assert got["failures"] == 2
    assert "No space left" in str(got["error"])
    assert got["after"] is None
    assert got["ids"] == ["c"]
