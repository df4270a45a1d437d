# SPDX-License-Identifier: Apache-2.0
"""What a whitelist of up to a million entries costs: time, memory here, memory of the kernel."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from netlab_perf import Pair, attached, pair, pin_folder
from perflib import ROOT, Options, Result, median, row

from shapeagent.kernel import bpf, maps
from shapeagent.model.types import EntryKind, Match, PackedBatch
from shapeagent.service.engine import Session

MILLION = 1_000_000
MB = 1e6
SINGLES = 2_000


def hosts(count: int, first: str = "10.0.0.0", name: str = "stream") -> PackedBatch:
    """Return a batch of IPv4 hosts that lie side by side."""
    start = int.from_bytes(bytes(int(part) for part in first.split(".")))
    keys = b"".join((start + number).to_bytes(4) for number in range(count))
    return PackedBatch(Match.DESTINATION, EntryKind.HOSTS4, keys, name, "ops", "perf")


def mixed(count: int) -> list[PackedBatch]:
    """Return batches of a quarter each: hosts and /24 or /64 prefixes, IPv4 and IPv6."""
    part = count // 4
    range_ = range(part)
    keys = {
        EntryKind.HOSTS4: b"".join((0x0A000000 + n).to_bytes(4) for n in range_),
        EntryKind.HOSTS6: b"".join((0x20010DB8 << 96 | n).to_bytes(16) for n in range_),
        EntryKind.PREFIXES4: b"".join(b"\x18" + (n << 8).to_bytes(4) for n in range_),
        EntryKind.PREFIXES6: b"".join(
            b"\x40" + (0x20010DB8 << 96 | n << 64).to_bytes(16) for n in range_
        ),
    }
    return [
        PackedBatch(Match.EITHER, kind, found, "stream", "ops", "perf")
        for kind, found in keys.items()
    ]


@contextlib.contextmanager
def _session(ends: Pair) -> Iterator[Session]:
    with (
        attached(ends, link_rate_bits_per_s=10_000_000_000, profile="htb"),
        ends.engine.session(ends.near.device) as session,
    ):
        yield session


def _replace_s(session: Session, wanted: Sequence[PackedBatch]) -> float:
    started = time.perf_counter()
    session.whitelist_apply(wanted, replace=True)
    return time.perf_counter() - started


@row("whitelist")
def whitelist_changes(options: Options) -> Sequence[Result]:
    """Replaces of packed batches, and single updates beside a million entries, in one session."""
    small, large, four, singles = [], [], [], []
    with pair() as ends, _session(ends) as session:
        for number in range(options.pick(5, 2)):
            first = f"{10 + number}.0.0.0"
            small.append(_replace_s(session, [hosts(100_000, first)]))
        for number in range(options.pick(3, 1)):
            four.append(_replace_s(session, mixed(MILLION)))
            large.append(_replace_s(session, [hosts(MILLION, f"{10 + number}.0.0.0")]))
        for number in range(options.pick(SINGLES, 500)):
            one = hosts(1, f"192.0.{number >> 8}.{number & 255}", "signal")
            started = time.perf_counter()
            session.whitelist_apply([one])
            singles.append(time.perf_counter() - started)
    p99 = sorted(singles)[int(len(singles) * 0.99)]
    return [
        Result("whitelist replace of 100,000 hosts, call to effect", min(small), "s", target=1.0),
        Result(
            "whitelist replace of 1,000,000 hosts, call to effect",
            min(large),
            "s",
            target=5.0,
            note=f"hosts and prefixes, v4 and v6: {min(four):.2f} s",
        ),
        Result(
            "single whitelist update beside 1,000,000, durable and in the kernel: p99",
            p99 * 1e3,
            "ms",
            target=3.0,
            note=f"p50 {median(singles) * 1e3:.2f} ms",
        ),
    ]


# --- memory of a process

_MEMORY = """
import sys
sys.path[:0] = sys.argv[1:]
from rows_whitelist import hosts, MILLION
from shapeagent.policy.entrytable import EntryTable
def pss_kb():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
wanted = [hosts(MILLION)]
before = pss_kb()
table = EntryTable()
table.apply(table.plan_replace(wanted))
after = pss_kb()
for turn in range(3):
    table.apply(table.plan_replace([hosts(MILLION, f"{20 + turn}.0.0.0")]))
print(after - before, pss_kb() - before)
"""


@row("whitelist-memory")
def table_memory(options: Options) -> Sequence[Result]:
    """What a table of a million hosts takes in a process of its own, also after replaces."""
    folders = [str(ROOT / "agent"), str(ROOT / "ctl"), str(Path(__file__).parent)]
    ran = subprocess.run(
        [sys.executable, "-c", _MEMORY, *folders],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    first, last = (int(word) * 1024 / MB for word in ran.stdout.split())
    return [
        Result(
            "memory of a table of 1,000,000 hosts",
            first,
            "MB",
            target=150,
            note=f"after three replaces {last:.0f} MB",
        )
    ]


# --- memory of the kernel


def _memlock_bytes(descriptor: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "memlock":
            return int(value)
    raise AssertionError("got no memlock in a map's fdinfo")


def _memory_of(number: int) -> int:
    try:
        descriptor = bpf.map_by_id(number)
    except OSError:
        return 0  # it went away meanwhile
    try:
        return _memlock_bytes(descriptor)
    finally:
        os.close(descriptor)


class _Peak(threading.Thread):
    """Sums the memory of every map made since it began, again and again."""

    def __init__(self, known: set[int]) -> None:
        super().__init__(daemon=True)
        self._known = known
        self._ended = threading.Event()
        self.bytes = self.looks = 0

    def run(self) -> None:
        while not self._ended.is_set():
            fresh = [number for number in bpf.map_ids() if number not in self._known]
            self.bytes = max(self.bytes, sum(map(_memory_of, fresh)))
            self.looks += 1
            time.sleep(0.002)

    def finish(self) -> int:
        """Stop looking. Returns the highest sum in bytes."""
        self._ended.set()
        self.join(10)
        assert self.looks > 10, f"got {self.looks} looks, want the whole of it seen"
        return self.bytes


def _pinned_bytes(ends: Pair) -> int:
    with contextlib.closing(maps.PinnedMaps(pin_folder(ends, ends.engine.bpffs_dir))) as opened:
        return sum(_memlock_bytes(opened[name]) for name in opened)


@row("whitelist-kernel")
def kernel_memory(options: Options) -> Sequence[Result]:
    """Memory of our maps as the kernel accounts it: nothing listed, a million, a replace of it."""
    known = set(bpf.map_ids())
    with pair() as ends, _session(ends) as session:
        empty = _pinned_bytes(ends)
        session.whitelist_apply([hosts(MILLION)], replace=True)
        fresh = [number for number in bpf.map_ids() if number not in known]
        full = sum(map(_memory_of, fresh))
        peak = _Peak(known)
        peak.start()
        session.whitelist_apply([hosts(MILLION, "20.0.0.0")], replace=True)
        most = peak.finish()
        session.whitelist_apply(mixed(MILLION), replace=True)
        fresh = [number for number in bpf.map_ids() if number not in known]
        of_all_kinds = sum(map(_memory_of, fresh))
    return [
        Result("kernel memory of an attachment without a whitelist", empty / MB, "MB", target=20),
        Result(
            "kernel memory with 1,000,000 hosts",
            full / MB,
            "MB",
            target=250,
            note=f"hosts and prefixes, v4 and v6: {of_all_kinds / MB:.0f} MB",
        ),
        Result(
            "kernel memory at the peak of a replace of 1,000,000",
            most / full,
            "times",
            target=2.0,
            note=f"{most / MB:.0f} MB",
        ),
    ]
