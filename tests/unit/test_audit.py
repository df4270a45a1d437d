# SPDX-License-Identifier: Apache-2.0
"""The audit log: durable before the answer, one line for each change, whole after a crash."""

from __future__ import annotations

import errno
import grp
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shapeagent.model.errors import ConflictError, FailedError, InputError, ShapeError
from shapeagent.service.identity import auditfile
from shapeagent.service.identity.audit import Audit
from shapeagent.service.identity.auditfold import LINES_PER_WINDOW, WINDOW_S, Folding
from shapeagent.service.identity.auditline import AuditEntry
from tests.unit.certkit import wait_until


def entry(number: object = 0, **more: Any) -> AuditEntry:
    fields: dict[str, Any] = {
        "who": "unix:operator", "role": "operator", "peer": "unix:", "method": "/a.B/C",
        "request_id": str(number), **more,
    }  # fmt: skip
    return AuditEntry(**fields)


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Return every line of the log and its older files, the oldest first."""
    older = sorted(log.parent.glob(f"{log.name}.[0-9]*"), key=lambda path: -int(path.suffix[1:]))
    text = "".join(path.read_text() for path in (*older, log))
    return [json.loads(line) for line in text.splitlines()]


def ids_of(log: Path) -> list[str]:
    return [line["request_id"] for line in lines_of(log)]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log" / "audit.jsonl"


@pytest.fixture
def audit(log: Path) -> Iterator[Audit]:
    made = Audit(log)
    yield made
    made.close()


def test_a_record_is_one_line_with_every_field(audit: Audit, log: Path) -> None:
    audit.record(
        entry(
            "r1", object="eth0 egress bulk", old="100mbit", new={"ceiling": 5}, why="test",
            entries=3, digest="ab" * 32,
        )
    )  # fmt: skip
    (line,) = lines_of(log)
    assert line.pop("time").endswith("Z")
    assert len(line.pop("id")) == 16
    assert line == {
        "who": "unix:operator", "role": "operator", "peer": "unix:", "method": "/a.B/C",
        "object": "eth0 egress bulk", "request_id": "r1", "why": "test", "result": "ok",
        "old": "100mbit", "new": {"ceiling": 5}, "entries": 3, "sha256": "ab" * 32,
    }  # fmt: skip


def test_a_change_is_one_line_with_its_result(audit: Audit, log: Path) -> None:
    ticket = audit.begin(entry("r1", why="asked"))
    assert lines_of(log) == [], "got a line before the change has ended"
    ticket.end(entry("r1", why="asked", result="no-such-device"))
    (line,) = lines_of(log)
    assert (line["request_id"], line["result"]) == ("r1", "no-such-device")
    with pytest.raises(RuntimeError):
        ticket.end(entry("r1"))
    assert len(lines_of(log)) == 1


def test_it_is_synced_before_it_returns(
    audit: Audit, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        real(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    for number in range(3):
        audit.record(entry(number))
        assert synced[-1] == log.stat().st_size, "got the answer before its line was on the disk"


def test_64_callers_share_syncs(audit: Audit, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        assert gate.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with ThreadPoolExecutor(64) as pool:
        first = pool.submit(audit.record, entry("first"))
        wait_until(lambda: audit._group.is_writing, "the first caller to wait for the disk")
        others = [pool.submit(audit.record, entry(number)) for number in range(63)]
        wait_until(lambda: len(audit._group.gathering.lines) == 63, "the others to gather")
        assert not any(one.done() for one in (first, *others)), "got an answer before the sync"
        gate.set()
        for one in (first, *others):
            one.result(30)
    facts = audit.facts()
    assert (facts.lines, facts.syncs) == (64, 2), f"got {facts}, want one sync for the 63"
    assert sorted(ids_of(log)) == sorted(["first", *map(str, range(63))])


def test_many_threads_lose_no_line_over_rotations(log: Path) -> None:
    audit = Audit(log, most_bytes=8192, kept=40)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: audit.record(entry(number)), range(600)))
    assert audit.facts().rotations > 5, f"got {audit.facts()}"
    audit.close()
    assert sorted(map(int, ids_of(log))) == list(range(600))


def test_only_so_many_older_files_stay_none_much_longer_than_asked(log: Path) -> None:
    audit = Audit(log, most_bytes=2000, kept=3)
    for number in range(100):
        audit.record(entry(number))
    audit.close()
    names = sorted(path.name for path in log.parent.iterdir())
    assert names == [
        "audit.jsonl", "audit.jsonl.1", "audit.jsonl.2", "audit.jsonl.3", "audit.jsonl.pending",
    ]  # fmt: skip
    assert all(path.stat().st_size <= 2000 for path in log.parent.glob("audit.jsonl*[0-9l]"))
    got = [int(one) for one in ids_of(log)]
    assert got == list(range(got[0], 100)), "want the newest, without a gap"


def test_files_are_for_root_and_the_group_that_reads_logs(log: Path) -> None:
    umask = os.umask(0o077)
    try:
        audit = Audit(log, most_bytes=500)
        for number in range(5):
            audit.record(entry(number))
        audit.close()
    finally:
        os.umask(umask)
    for path in log.parent.glob("audit.jsonl*[0-9l]"):
        found = path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o640, f"got {oct(found.st_mode)} of {path}"
        if os.geteuid() == 0:
            assert found.st_gid == grp.getgrnam("adm").gr_gid
    assert stat.S_IMODE((log.parent / "audit.jsonl.pending").stat().st_mode) == 0o600


def test_room_is_set_aside_and_given_back(audit: Audit, log: Path) -> None:
    audit.record(entry())
    found = log.stat()
    assert found.st_blocks * 512 > found.st_size + (512 << 10), "got no room set aside"
    audit.close()
    found = log.stat()
    assert found.st_blocks * 512 < 64 << 10, f"got {found.st_blocks * 512} bytes kept at the end"


def test_a_line_cut_at_any_byte_is_closed_off(log: Path) -> None:
    audit = Audit(log)
    audit.record(entry("whole"))
    whole = log.read_bytes()
    audit.record(entry("cut"))
    audit.close()
    both = log.read_bytes()
    for size in range(len(whole) + 1, len(both)):
        log.write_bytes(both[:size])
        audit = Audit(log)
        audit.record(entry("next"))
        audit.close()
        lines = lines_of(log)
        assert [line["request_id"] for line in lines] == ["whole", "", "next"]
        assert lines[1]["method"] == "audit.recover"
        assert lines[1]["old"].encode("latin-1") == both[len(whole) : size]


@pytest.mark.parametrize("content", [b"\0" * 5000, b"x" * 200_000, b"{", b"a\n" + b"\xff" * 70_000])
def test_rubbish_without_an_end_is_closed_off(content: bytes, log: Path) -> None:
    log.parent.mkdir()
    log.write_bytes(content)
    audit = Audit(log)
    audit.record(entry("next"))
    audit.close()
    text = log.read_bytes().splitlines()
    assert text[: len(text) - 2] == content.splitlines()[:-1]
    assert [json.loads(line)["request_id"] for line in text[-2:]] == ["", "next"]


def test_a_change_that_its_process_did_not_end_is_written_by_the_next(log: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from shapeagent.service.identity.audit import Audit, AuditEntry\n"
        "audit = Audit(Path(sys.argv[1]))\n"
        "one = lambda n: AuditEntry('w', 'admin', 'p', '/a.B/C', request_id=n)\n"
        "audit.begin(one('ended')).end(one('ended'))\n"
        "audit.begin(one('open 1')); audit.begin(one('open 2'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(log)], check=False, timeout=60)
    assert ids_of(log) == ["ended"]
    for _ in range(2):  # and by that one only
        Audit(log).close()
        got = {line["request_id"]: line["result"] for line in lines_of(log)}
        assert got == {"ended": "ok", "open 1": "interrupted", "open 2": "interrupted"}
        assert len(lines_of(log)) == 3


def test_a_change_whose_line_is_there_is_not_written_twice(log: Path) -> None:
    audit = Audit(log)
    ticket = audit.begin(entry("r1"))
    pending = (log.parent / "audit.jsonl.pending").read_bytes()
    ticket.end(entry("r1"))
    audit.close()
    # As if it was killed after its line was written and before its slot was freed.
    (log.parent / "audit.jsonl.pending").write_bytes(pending)
    Audit(log).close()
    assert [line["result"] for line in lines_of(log)] == ["ok"]


def test_a_damaged_slot_is_passed_over(log: Path) -> None:
    audit = Audit(log)
    audit.begin(entry("r1"))
    audit.begin(entry("r2"))
    audit._pending.close()
    path = log.parent / "audit.jsonl.pending"
    content = bytearray(path.read_bytes())
    content[30] ^= 1
    path.write_bytes(bytes(content[:-1]))
    again = Audit(log)
    again.begin(entry("next")).end(entry("next"))
    again.close()
    assert ids_of(log) == ["next"]


def test_a_second_process_is_refused(audit: Audit, log: Path) -> None:
    audit.record(entry("mine"))
    with log.open("ab") as file:
        file.write(b'{"half')  # as if the first was just writing: it must not be taken for cut
    with pytest.raises(ConflictError) as caught:
        Audit(log)
    assert caught.value.reference == "audit-in-use"
    assert log.read_bytes().endswith(b'{"half')


def test_a_log_that_is_moved_away_or_deleted_begins_anew(audit: Audit, log: Path) -> None:
    audit.record(entry("a"))
    log.rename(log.parent / "taken")
    audit.record(entry("b"))
    assert ids_of(log) == ["b"]
    log.unlink()
    audit.record(entry("c"))
    assert ids_of(log) == ["c"]
    log.write_bytes(b"")  # logrotate's copytruncate
    audit.record(entry("d"))
    assert ids_of(log) == ["d"]


@pytest.mark.parametrize(
    "place",
    [
        lambda log: log.symlink_to("/dev/null"),
        lambda log: log.mkdir(),
        lambda log: os.mkfifo(log),
        lambda log: (log.parent.rmdir(), log.parent.write_text("")),
    ],
)
def test_a_log_that_is_no_file_is_refused(place: Callable[[Path], object], log: Path) -> None:
    log.parent.mkdir()
    place(log)
    with pytest.raises(FailedError) as caught:
        Audit(log)
    assert caught.value.reference == "audit-unwritable"


def _failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int = 1) -> None:
    real = getattr(os, name)
    left = [times]

    def fail(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, name, fail)


def test_a_line_that_could_not_be_synced_is_not_in_the_log(
    audit: Audit, log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    audit.record(entry("before"))
    _failing(monkeypatch, "fdatasync", errno.EIO)
    with pytest.raises(FailedError, match="Input/output error") as caught:
        audit.record(entry("lost"))
    assert caught.value.reference == "audit-unwritable"
    assert ids_of(log) == ["before"]
    assert '"lost"' in caplog.text, "want the line in the process's own log"
    assert audit.facts().error is not None
    audit.record(entry("after"))
    assert ids_of(log) == ["before", "after"]
    assert (audit.facts().error, audit.facts().failures) == (None, 1)


def test_the_line_of_a_change_that_the_disk_lost_is_written_by_the_next_start(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(log)
    ticket = audit.begin(entry("r1"))
    _failing(monkeypatch, "fdatasync", errno.EIO)
    with pytest.raises(FailedError):
        ticket.end(entry("r1", new="done"))
    audit.close()
    assert lines_of(log) == []
    Audit(log).close()
    assert [(line["new"], line["result"]) for line in lines_of(log)] == [("done", "ok")]


def test_a_write_that_stops_half_way_leaves_no_half_line(
    audit: Audit, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit.record(entry("before"))
    real = os.write
    calls = []

    def write(descriptor: int, data: Any) -> int:
        calls.append(1)
        if len(calls) == 1:
            return real(descriptor, bytes(data)[:20])
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(FailedError):
        audit.record(entry("half"))
    audit.record(entry("after"))
    assert ids_of(log) == ["before", "after"]


def test_where_it_cannot_rotate_it_goes_on_and_says_so(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = Audit(log, most_bytes=600, kept=2)
    for number in range(4):
        audit.record(entry(number))
    with monkeypatch.context() as patch:
        patch.setattr(auditfile, "_create", _raise_full)
        for number in range(4, 8):
            audit.record(entry(number))
        error = audit.facts().error
        assert error is not None
        assert "cannot rotate" in error
    for number in range(8, 10):
        audit.record(entry(number))
    assert audit.facts().error is None
    audit.close()
    got = [int(one) for one in ids_of(log)]
    assert got == list(range(got[0], 10)), "want no gap"
    assert got[0] <= 4


def _raise_full(path: Path) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_after_its_end_nothing_is_written(log: Path) -> None:
    audit = Audit(log)
    audit.close()
    audit.close()
    for act in (lambda: audit.record(entry()), lambda: audit.begin(entry())):
        with pytest.raises(FailedError):
            act()


def test_a_flood_of_refusals_pushes_no_line_out(log: Path) -> None:
    audit = Audit(log, most_bytes=20_000, kept=1)
    audit.record(entry("precious"))
    for _ in range(3000):
        audit.record_denied(entry("denied", result="denied"))
    audit.record_denied(entry("other", who="unix:observer", result="denied"))
    assert audit.facts().folded == 3000 - LINES_PER_WINDOW
    audit.close()
    lines = lines_of(log)
    assert [line["request_id"] for line in lines] == [
        "precious", *["denied"] * LINES_PER_WINDOW, "other", "denied",
    ]  # fmt: skip
    assert lines[-1]["repeated"] == 3000 - LINES_PER_WINDOW


def test_counts_are_due_after_their_minute_each_kind_on_its_own() -> None:
    folding = Folding()
    for _ in range(LINES_PER_WINDOW + 5):
        folding.admit(entry(result="denied"), 100.0)
    assert folding.admit(entry(result="client-unknown"), 101.0), "another reason is another kind"
    assert folding.admit(entry(who="x", result="denied"), 101.0), "another caller too"
    assert folding.take_due(100.0 + WINDOW_S - 0.1) == []
    due = folding.take_due(100.0 + WINDOW_S)
    assert [(one.result, count) for one, count in due] == [("denied", 5)]
    assert folding.admit(entry(result="denied"), 161.0), "a new minute begins"
    assert folding.take_due(1e6) == [], "what was not folded has no count"


def test_kinds_are_bounded() -> None:
    folding = Folding()
    for number in range(5000):
        for _ in range(LINES_PER_WINDOW + 1):
            folding.admit(entry(who=str(number), result="denied"), 100.0)
        folding.take_due(100.0)
    assert len(folding._windows) == 1024
    assert len(folding.take_due(100.0, everything=True)) == 1024


# Begins and records from some threads until it is killed; says on stdout what it was told.
_VICTIM = """
import os, sys, threading
from pathlib import Path
from shapeagent.service.identity.audit import Audit, AuditEntry
log, first = Path(sys.argv[1]), int(sys.argv[2])
audit = Audit(log, most_bytes=65536, kept=400)
lock = threading.Lock()
numbers = iter(range(first, first + 100_000))
def say(text):
    os.write(1, (text + "\\n").encode())
def work():
    while True:
        with lock:
            number = str(next(numbers))
        one = AuditEntry("w", "admin", "p", "/a.B/C", request_id=number, why="x" * 300)
        ticket = audit.begin(one)
        say("begun " + number)
        ticket.end(one)
        say("told " + number)
for _ in range(8):
    threading.Thread(target=work).start()
"""


def test_a_kill_at_any_time_loses_no_line_and_leaves_no_half(log: Path) -> None:
    begun: set[str] = set()
    told: set[str] = set()
    for kill in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", _VICTIM, str(log), str(kill * 100_000)],
            stdout=subprocess.PIPE,
            text=True,
        ) as victim:
            assert victim.stdout is not None
            for count, line in enumerate(victim.stdout):
                word, number = line.split()
                (begun if word == "begun" else told).add(number)
                if count == 40 + 23 * kill:  # the pipe is read in the middle of what it does
                    victim.kill()
    Audit(log).close()
    results: dict[str, list[str]] = {}
    for found in lines_of(log):
        if found["method"] == "/a.B/C":
            results.setdefault(found["request_id"], []).append(found["result"])
        else:
            assert found["method"] == "audit.recover", f"got {found}"
    twice = {number: got for number, got in results.items() if len(got) != 1}
    assert not twice, f"got {twice}, want one line each"
    lost = begun - results.keys()
    assert not lost, f"got no line for {sorted(lost)[:5]}, want one for each change"
    wrong = {number for number in told if results[number] != ["ok"]}
    assert not wrong, f"got {sorted(wrong)[:5]} told ok and logged otherwise"
    interrupted = [number for number, got in results.items() if got == ["interrupted"]]
    assert interrupted, "got no change caught under way by 20 kills, want some"
    assert len(told) > 500, f"got {len(told)} changes only"


def test_errors_say_what_to_type(log: Path) -> None:
    log.parent.mkdir()
    log.mkdir()
    with pytest.raises(ShapeError) as caught:
        Audit(log)
    assert caught.value.hint is not None
    assert str(log.parent) in caught.value.hint
    assert not isinstance(caught.value, InputError)
