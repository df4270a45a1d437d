# SPDX-License-Identifier: Apache-2.0
"""One session, many changes of a whitelist: packed batches, pages, expiry, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from enginekit import Bench, entry, environment, wait_until

from shapeagent.kernel import bpf, lists
from shapeagent.kernel.clock import JiffiesClock
from shapeagent.kernel.datapath import Control, Datapath
from shapeagent.kernel.listread import Listed, read_lists
from shapeagent.kernel.maps import PinnedMaps
from shapeagent.model.errors import ConflictError, FailedError, InputError
from shapeagent.model.reports import WhitelistPage
from shapeagent.model.types import EntryKind, Match, PackedBatch
from shapeagent.policy.packed import pack_entries
from shapeagent.service.engine import Session

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
]


def hosts(count: int, first: str = "10.0.0.0", name: str = "bulk") -> PackedBatch:
    start = int.from_bytes(bytes(int(part) for part in first.split(".")))
    keys = b"".join((start + number).to_bytes(4) for number in range(count))
    return PackedBatch(Match.DESTINATION, EntryKind.HOSTS4, keys, name, "ops")


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    made = bench()
    made.attach(profile="police")
    return made


def in_force(one: Bench) -> list[Listed]:
    with contextlib.closing(PinnedMaps(one.pins)) as maps:
        return read_lists(maps, Datapath(maps, 1).read_control().active_lists)


def check_same(one: Bench, session: Session) -> None:
    """Fail unless session, kernel and status agree on how many entries there are."""
    total = len(session.whitelist_list())
    assert len(in_force(one)) == total, f"got {len(in_force(one))} in the kernel, want {total}"
    assert one.status().whitelist_entries == total, f"got {one.status().whitelist_entries}"


def test_many_changes_of_one_session(one: Bench) -> None:
    with one.engine.session(one.device) as session:
        done = session.whitelist_apply([hosts(1000)])
        assert (done.added, done.total, done.generation) == (1000, 1000, 1), f"got {done}"
        assert any("dns" in text for text in done.warnings), f"got {done.warnings}"
        done = session.whitelist_apply([hosts(1, "10.0.0.7", "stream")])
        assert (done.added, done.changed, done.generation) == (0, 1, 2), f"got {done}"
        check_same(one, session)
        done = session.whitelist_apply([hosts(2, "10.0.3.231")], [hosts(500), hosts(9, "11.0.0.0")])
        assert (done.added, done.removed, done.total) == (1, 500, 501), f"got {done}"
        check_same(one, session)
        with pytest.raises(ConflictError) as caught:
            session.whitelist_apply([hosts(5)], replace=True, expected_generation=2)
        assert caught.value.reference == "generation-differs", f"got {caught.value.reference}"
        done = session.whitelist_apply([hosts(5)], replace=True, expected_generation=3)
        assert (done.added, done.removed, done.total) == (5, 501, 5), f"got {done}"
        assert done.generation == one.status().whitelist_generation == 4
        done = session.whitelist_apply([hosts(5)], replace=True)
        assert (done.unchanged, done.generation) == (5, 4), f"got {done}, want no new generation"
        check_same(one, session)
        kept = session.whitelist_list()
    assert one.engine.whitelist_list(one.device) == kept, "got another list after the session"


def test_pages_are_the_list(one: Bench) -> None:
    batches = [hosts(25), *pack_entries([entry("2001:db8::/32"), entry("192.0.2.1>192.0.2.2")])]
    one.engine.whitelist_apply(one.device, batches)
    want = one.engine.whitelist_list(one.device)
    assert len(want) == 27
    with one.engine.session(one.device) as session:

        def ask_engine(after: str | None) -> WhitelistPage:
            return one.engine.whitelist_page(one.device, after, 10)

        def ask_session(after: str | None) -> WhitelistPage:
            return session.whitelist_page(after, 10)

        for ask in (ask_engine, ask_session):
            page = ask(None)
            rows = [*page.rows]
            while page.after is not None:
                page = ask(page.after)
                rows += page.rows
            assert (page.total, page.generation, len(page.rows)) == (27, 1, 7), f"got {page}"
            assert tuple(rows) == want
        bad: list[tuple[str | None, int]] = [
            ("nonsense", 10), ("source.hosts4.00", 10), (None, 0), (None, 10**6),
        ]  # fmt: skip
        for after, limit in bad:
            with pytest.raises(InputError) as caught:
                session.whitelist_page(after, limit)
            assert caught.value.reference == "bad-page", f"got {caught.value.reference}"


@pytest.mark.parametrize(
    ("bad", "want"),
    [
        (
            [PackedBatch(Match.SOURCE, EntryKind.PREFIXES4, b"\x18\xc0\0\2\x43" * 3, "bulk")],
            "whitelist-invalid",
        ),
        ([hosts(3, name="nobody")], "no-such-class"),
        (
            [PackedBatch(Match.SOURCE, EntryKind.PREFIXES4, bytes(5), "bulk")],
            "whitelist-everything",
        ),
        ([hosts(3, name="stream"), hosts(3)], "whitelist-invalid"),
    ],
)
def test_what_is_refused_changes_nothing(one: Bench, bad: list[PackedBatch], want: str) -> None:
    path = one.engine.run_dir / one.key / "whitelist.log"
    with one.engine.session(one.device) as session:
        session.whitelist_apply([hosts(10)])
        before = (path.read_bytes(), session.whitelist_list(), in_force(one))
        for replace in (False, True):
            with pytest.raises(InputError) as caught:
                session.whitelist_apply([hosts(100, "11.0.0.0"), *bad], replace=replace)
            assert caught.value.reference == want, f"got {caught.value.reference}, want {want}"
        with pytest.raises(InputError):
            session.whitelist_apply([], [PackedBatch(Match.PAIR, EntryKind.HOSTS4, bytes(4))])
        after = (path.read_bytes(), session.whitelist_list(), in_force(one))
        assert after == before, "got a change by what was refused"


def test_an_address_in_several_roles_keeps_the_others(one: Bench) -> None:
    """In the kernel they share one element."""
    lines = ("192.0.2.9 class=bulk match=either", "192.0.2.9 class=stream match=source")
    either, source = (entry(line) for line in lines)
    with one.engine.session(one.device) as session:
        session.whitelist_add([either])
        session.whitelist_add([source])
        found = {(row.match, row.class_number) for row in in_force(one)}
        session.whitelist_remove([source])
        assert [row.match for row in in_force(one)] == [Match.EITHER], f"got {in_force(one)}"
        session.whitelist_add([source])
        assert {(row.match, row.class_number) for row in in_force(one)} == found
        session.whitelist_remove([either])
        assert [row.match for row in in_force(one)] == [Match.SOURCE], f"got {in_force(one)}"


# --- what goes wrong in the middle


def test_a_list_that_does_not_fit_leaves_the_session_as_it_was(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one.engine.session(one.device) as session:
        session.whitelist_apply([hosts(10)])
        before = session.whitelist_list()
        for replace in (False, True):
            monkeypatch.setattr(lists, "capacity_for", lambda count: 100)
            with pytest.raises(FailedError) as caught:
                session.whitelist_apply([hosts(5_000, "11.0.0.0")], replace=replace)
            assert caught.value.reference == "map-full", f"got {caught.value.reference}"
            monkeypatch.undo()
            assert session.whitelist_list() == before
            check_same(one, session)
        done = session.whitelist_apply([hosts(5_000, "11.0.0.0")])
        assert (done.total, done.generation) == (5_010, 2), f"got {done}"
    assert len(one.engine.whitelist_list(one.device)) == 5_010


@pytest.mark.parametrize("verb", ["add", "remove"])
def test_a_single_change_that_fails_half_way_is_taken_back(
    one: Bench, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    with one.engine.session(one.device) as session:
        session.whitelist_apply([hosts(10)])
        before = (session.whitelist_list(), set(in_force(one)))
        real, calls = Datapath.write_control, []

        def fail_once(self: Datapath, control: Control) -> None:
            calls.append(control)
            if len(calls) == 1:
                raise OSError("the kernel refused")
            real(self, control)

        monkeypatch.setattr(Datapath, "write_control", fail_once)
        change = session.whitelist_add if verb == "add" else session.whitelist_remove
        with pytest.raises(OSError, match="refused"):
            change([entry("192.0.2.9" if verb == "add" else "10.0.0.3", "bulk")])
        monkeypatch.undo()
        after = (session.whitelist_list(), set(in_force(one)))
        assert after == before, f"got {after}, want {before}"
        session.whitelist_add([entry("192.0.2.9", "bulk")])
        check_same(one, session)


def test_an_interrupt_after_the_switch_leaves_the_new_list(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with one.engine.session(one.device) as session:
        session.whitelist_apply([hosts(10)])
        monkeypatch.setattr(bpf, "wait_for_readers", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.whitelist_apply([hosts(5, "11.0.0.0")], replace=True)
        monkeypatch.undo()
        assert len(session.whitelist_list()) == 5
        check_same(one, session)
    assert len(one.engine.whitelist_list(one.device)) == 5
    one.engine.whitelist_apply(one.device, [hosts(7)], replace=True)
    assert len(in_force(one)) == 7


def test_a_log_that_another_wrote_to_is_read_again(one: Bench) -> None:
    """Whoever is not kept away by the lock: the session does not write over what it did."""
    with one.engine.session(one.device) as session:
        session.whitelist_apply([hosts(10)])
        attached = session._attached
        other = Session(attached.engine._open_key(attached.rtnl, one.key))
        other.whitelist_apply([hosts(5, "11.0.0.0")])
        other._attached.close()
        assert len(session.whitelist_list()) == 15
        done = session.whitelist_add([entry("192.0.2.9", "bulk")])
        assert (done.total, done.generation) == (16, 3), f"got {done}"
        check_same(one, session)


_ON_A_FULL_DISK = """
import os, sys
from pathlib import Path
from shapeagent.model.errors import FailedError
from shapeagent.model.reports import WhitelistPage
from shapeagent.model.types import EntryKind, Match, PackedBatch
from shapeagent.service.engine import Engine
netns, device, run_dir, bpffs_dir = sys.argv[1:]
engine = Engine(netns=netns, run_dir=Path(run_dir), bpffs_dir=Path(bpffs_dir))

def host(number):
    keys = (0x0B000000 + number).to_bytes(4)
    return PackedBatch(Match.SOURCE, EntryKind.HOSTS4, keys, "bulk")

done = 0
with engine.session(device) as session:
    before = len(session.whitelist_list())
    filler = os.open(Path(run_dir) / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(filler, bytes(4096))
    except OSError:
        pass
    try:
        while done < 100_000:
            session.whitelist_apply([host(done)])
            done += 1
    except FailedError as error:
        print("refused:", error.reference, error.message)
    try:
        many = b"".join(number.to_bytes(4) for number in range(10_000))
        session.whitelist_apply([PackedBatch(Match.SOURCE, EntryKind.HOSTS4, many, "bulk")])
    except FailedError as error:
        print("refused:", error.reference)
    assert len(session.whitelist_list()) == before + done
    os.close(filler)
    (Path(run_dir) / "filler").unlink()
    session.whitelist_apply([host(done)])
assert len(engine.whitelist_list(device)) == before + done + 1
print("listed:", before, done)
"""


def test_a_full_disk_refuses_the_change_and_keeps_the_list(one: Bench, tmp_path: Path) -> None:
    """The state lies on a small tmpfs, in a mount namespace of the test's own."""
    one.engine.whitelist_apply(one.device, [hosts(10)])
    run_dir = one.engine.run_dir
    words = [one.netns, one.device, str(run_dir), str(one.engine.bpffs_dir)]
    small = tmp_path / "small"
    small.mkdir()
    mount = (
        f"mount -t tmpfs -o size=512k none {small} && cp -a {run_dir}/. {small} && "
        f'mount --bind {small} {run_dir} && exec "$@"'
    )
    ran = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", mount, "sh",
         sys.executable, "-c", _ON_A_FULL_DISK, *words],
        capture_output=True, text=True, check=False, timeout=60, env=environment(),
    )  # fmt: skip
    assert ran.returncode == 0, f"got {ran.returncode}: {ran.stdout} {ran.stderr}"
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("refused: state-unwritable"), f"got {lines}"
    assert "No space left" in lines[0], f"got {lines}"
    assert lines[1] == "refused: state-unwritable", f"got {lines}"
    total = 10 + int(lines[2].split()[2]) + 1
    assert len(in_force(one)) == total, f"got {len(in_force(one))} in the kernel, want {total}"


# --- time


def test_expired_entries_are_removed_from_kernel_and_log(one: Bench) -> None:
    lasting = hosts(3)
    ends = time.time() + 0.4
    short = PackedBatch(
        Match.SOURCE, EntryKind.HOSTS4, bytes((192, 0, 2, 1, 192, 0, 2, 2)), "bulk", "ops", "", ends
    )
    with one.engine.session(one.device) as session:
        session.whitelist_apply([lasting, short])
        none = session.whitelist_expire()
        assert (none.removed, none.next_unix_s) == (0, ends), f"got {none}"
        generation = session.whitelist_page().generation
        wait_until(lambda: time.time() > ends, "the expiry")
        assert len(session.whitelist_list()) == 3, "got an expired entry listed"
        assert len(in_force(one)) == 5
        gone = session.whitelist_expire()
        assert (gone.removed, gone.total, gone.next_unix_s) == (2, 3, None), f"got {gone}"
        assert {row.source for row in gone.rows} == {"192.0.2.1", "192.0.2.2"}, f"got {gone}"
        assert session.whitelist_page().generation == generation
        check_same(one, session)


def test_entries_that_ended_since_they_were_read_are_left_out(one: Bench) -> None:
    """A batch that says so is refused: whoever packs it knows the time."""
    over = entry("192.0.2.1", "bulk", expires_unix_s=time.time() - 1)
    with one.engine.session(one.device) as session:
        done = session.whitelist_add([entry("192.0.2.2", "bulk"), over])
        assert (done.total, len(done.notices)) == (1, 1), f"got {done}"
        done = session.whitelist_replace([entry("192.0.2.3", "bulk"), over])
        assert (done.total, len(done.notices)) == (1, 1), f"got {done}"
        with pytest.raises(InputError) as caught:
            session.whitelist_apply(pack_entries([over]))
        assert "has expired already" in caught.value.details[0], f"got {caught.value.details}"


@pytest.mark.parametrize("count", [1, 3_000])
def test_what_expired_while_nobody_ran_is_removed_by_the_next(one: Bench, count: int) -> None:
    ends = time.time() + 1.0
    batch = hosts(count)
    short = PackedBatch(batch.match, batch.kind, batch.keys, "bulk", "ops", "", ends)
    one.engine.whitelist_apply(one.device, [hosts(2, "11.0.0.0"), short])
    assert one.status().whitelist_entries == count + 2
    wait_until(lambda: time.time() > ends, "the expiry")
    gone = one.engine.whitelist_expire(one.device)
    assert (gone.removed, gone.total) == (count, 2), f"got {gone.removed} removed"
    assert len(gone.rows) == min(count, 1_000)
    assert len(in_force(one)) == 2
    assert one.engine.whitelist_expire(one.device).removed == 0


def test_a_clock_that_was_set_moves_the_kernels_deadlines(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts jiffies, which no clock step touches; an expiry is a time of day."""
    real, ends = time.time, time.time() + 3_600
    short = PackedBatch(Match.SOURCE, EntryKind.HOSTS4, bytes(4), "bulk", "", "", ends)
    jiffy_s = float(one.state()["kernel"]["jiffy_ns"]) / 1e9

    def left_s() -> float:
        (listed,) = in_force(one)
        with contextlib.closing(JiffiesClock()) as clock:
            return (listed.expires_jiffies - clock.read()) * jiffy_s

    with one.engine.session(one.device) as session:
        session.whitelist_apply([short])
        assert abs(left_s() - 3_600) < 2, f"got {left_s():.1f} s, want an hour"
        before = one.status().whitelist_generation
        monkeypatch.setattr(time, "time", lambda: real() + 1.0)  # drift
        session.whitelist_expire()
        assert abs(left_s() - 3_600) < 2, f"got {left_s():.1f} s, want it left"
        monkeypatch.setattr(time, "time", lambda: real() - 1_800)
        session.whitelist_expire()
        assert abs(left_s() - 5_400) < 2, f"got {left_s():.1f} s after half an hour back"
        monkeypatch.setattr(time, "time", lambda: real() + 1_800)
        session.whitelist_expire()
        assert abs(left_s() - 1_800) < 2, f"got {left_s():.1f} s after an hour forward"
        assert one.status().whitelist_generation == before
    with one.engine.session(one.device) as session:
        monkeypatch.setattr(time, "time", real)
        session.whitelist_expire()
        assert abs(left_s() - 3_600) < 2, f"got {left_s():.1f} s, want it right after a restart"
        monkeypatch.setattr(time, "time", lambda: real() + 4_000)
        assert session.whitelist_expire().removed == 1, "got it left, though its time is over"
        assert in_force(one) == []
