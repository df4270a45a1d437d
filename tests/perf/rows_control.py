# SPDX-License-Identifier: Apache-2.0
"""What attaching, importing and changing cost, on a veth in namespaces of its own."""

from __future__ import annotations

import os
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from netlab_perf import BulkLoad, Pair, attached, bulk_packets, pair, pin_folder, shapectl
from perflib import Options, Result, median, row, tcp_frame

from shapeagent.kernel import bpf, maps
from shapeagent.kernel import compile as kernel_compile
from shapeagent.kernel.datapath import Datapath
from shapeagent.kernel.probe import read_possible_cpus
from shapeagent.service import listfiles

PINS = Path("/sys/fs/bpf/shapectl")  # where the command line pins
ENTRIES = 100_000
SENDS_PER_S = 2_000
CHANGES = 1_000


# --- whitelist import


def _write_list(path: Path) -> tuple[str, str]:
    """Write half hosts, half /24 prefixes. Returns an address of the first and last entry."""
    lines = [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}" for i in range(ENTRIES // 2)]
    lines += [f"{64 + (i >> 16)}.{i >> 8 & 255}.{i & 255}.0/24" for i in range(ENTRIES // 2)]
    path.write_text("\n".join(lines) + "\n")
    last = ENTRIES // 2 - 1
    return "10.0.0.0", f"{64 + (last >> 16)}.{last >> 8 & 255}.{last & 255}.9"


class _Watcher(threading.Thread):
    """Asks the loaded program about both ends of the list again and again.

    The later question must not get the older answer: a mix of old and new
    shows as `mixed`.
    """

    def __init__(self, folder: Path, near: str, addresses: tuple[str, str]) -> None:
        super().__init__(daemon=True)
        self._maps = maps.PinnedMaps(folder)
        self._datapath = Datapath(self._maps, read_possible_cpus())
        self._program = bpf.get_pinned(str(folder / "shp_explain_out"))
        self._frames = [tcp_frame(near, address, 40_000, 41_000) for address in addresses]
        self._ended = threading.Event()
        self.asked = self.mixed = 0
        self.listed = False

    def _is_listed(self, number: int) -> bool:
        answer = self._datapath.explain(self._program, self._frames[number])
        return answer.code in (24, 25)  # SHP_V_HOST, SHP_V_PREFIX

    def run(self) -> None:
        while not self._ended.is_set():
            for first, second in ((0, 1), (1, 0)):
                before, after = self._is_listed(first), self._is_listed(second)
                self.mixed += before and not after
                self.asked += 1
                self.listed = after
            time.sleep(0.0005)

    def sees_the_list(self) -> bool:
        """Return whether the last question found its address listed."""
        return self.listed

    def finish(self) -> None:
        """Stop asking and close."""
        self._ended.set()
        self.join(10)
        self._maps.close()
        bpf.close_all([self._program])


@row("import")
def whitelist_import(options: Options) -> Sequence[Result]:
    """100,000 entries from a file: by the command line, process start included, and in process."""
    by_command: list[float] = []
    by_engine: list[float] = []
    asked = mixed = 0
    with tempfile.TemporaryDirectory(prefix="shp-perf-") as folder, pair() as ends:
        path = Path(folder) / "list.txt"
        addresses = _write_list(path)
        for _ in range(options.pick(5, 2)):
            shapectl(ends, "attach", ends.near.device, "--link-rate", "10gbit", "--profile", "htb")
            try:
                started = time.perf_counter()
                shapectl(ends, "whitelist", "import", str(path), "--class", "stream")
                by_command.append(time.perf_counter() - started)
            finally:
                shapectl(ends, "detach", ends.near.device)
            with attached(ends, link_rate_bits_per_s=10_000_000_000, profile="htb"):
                watcher = _Watcher(
                    pin_folder(ends, ends.engine.bpffs_dir), ends.near.ipv4, addresses
                )
                watcher.start()
                try:
                    started = time.perf_counter()
                    entries, _ = listfiles.parse_whitelist_file(
                        str(path), listfiles.LineDefaults(traffic_class="stream")
                    )
                    ends.engine.whitelist_import(ends.near.device, entries)
                    by_engine.append(time.perf_counter() - started)
                    _wait_for(watcher.sees_the_list)
                finally:
                    watcher.finish()
                asked, mixed = asked + watcher.asked, mixed + watcher.mixed
    return [
        Result(
            "whitelist import of 100,000 entries, file to effect",
            min(by_command),
            "s",
            target=1.0,
            note=f"shapectl, start of Python included; in process {min(by_engine):.2f} s; "
            f"mixed answers: {mixed} of {asked}",
            failure="" if not mixed else f"{mixed} answers mixed old and new",
        )
    ]


def _wait_for(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not true within {limit_s} s"
        time.sleep(0.001)


# --- attach and detach


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Let `find_image` use a cache that is empty: the next attach compiles."""
    defaults = kernel_compile.find_image.__kwdefaults__
    assert defaults is not None
    old = defaults["cache_dir"]
    with tempfile.TemporaryDirectory(prefix="shp-perf-") as folder:
        defaults["cache_dir"] = Path(folder)
        try:
            yield
        finally:
            defaults["cache_dir"] = old


@row("attach")
def attach_and_detach(options: Options) -> Sequence[Result]:
    """Attach with an empty image cache, less the compile time that it reports; and detach."""
    beyond, compiles, detaches, warm = [], [], [], []
    with pair() as ends:
        request = ends.attach(link_rate_bits_per_s=10_000_000_000, profile="htb")
        for _ in range(options.pick(5, 2)):
            with _empty_cache():
                started = time.perf_counter()
                report = ends.engine.attach(request)
                total = time.perf_counter() - started
            assert report.compiled, "got a cached image, want a cold attach"
            beyond.append(total - report.compile_s)
            compiles.append(report.compile_s)
            started = time.perf_counter()
            ends.engine.detach(ends.near.device)
            detaches.append(time.perf_counter() - started)
            started = time.perf_counter()
            ends.engine.attach(request)
            warm.append(time.perf_counter() - started)
            ends.engine.detach(ends.near.device)
    return [
        Result(
            "attach, cold, beyond compile",
            min(beyond),
            "s",
            target=0.3,
            note=f"compile {min(compiles):.2f} s; with a cached image {min(warm):.2f} s in all",
        ),
        Result("detach", min(detaches), "s", target=0.3),
    ]


# --- doctor


@row("doctor")
def doctor_looks(options: Options) -> Sequence[Result]:
    """Look at host and device, start of Python included."""
    spent = []
    with pair() as ends:
        for _ in range(options.pick(10, 3)):
            started = time.perf_counter()
            shapectl(ends, "doctor", ends.near.device)
            spent.append(time.perf_counter() - started)
    return [
        Result(
            "doctor, start of Python included",
            min(spent),
            "s",
            target=0.5,
            note=f"median {median(spent):.2f} s",
        )
    ]


# --- what stays


@row("stays")
def nothing_stays(options: Options) -> Sequence[Result]:
    """Processes that `shapectl attach` leaves: heirs of its environment, or with our maps open."""
    mark = f"SHAPECTL_PERF={secrets.token_hex(8)}"
    name, _, value = mark.partition("=")
    with pair() as ends:
        before = set(PINS.glob("*"))
        shapectl(
            *(ends, "attach", ends.near.device, "--link-rate", "10gbit", "--profile", "htb"),
            environment={name: value},
        )
        try:
            ours = _map_ids(set(PINS.glob("*")) - before)
            assert ours, f"got no new pins under {PINS}"
            left = [
                pid
                for pid in _processes()
                if pid != os.getpid() and (_has_mark(pid, mark.encode()) or _holds(pid, ours))
            ]
        finally:
            shapectl(ends, "detach", ends.near.device)
    return [
        Result("processes that stay after an in-process attach", len(left), "processes", target=0)
    ]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _holds(pid: int, ids: set[int]) -> bool:
    """Return whether a process has one of these maps open."""
    try:
        descriptors = os.listdir(f"/proc/{pid}/fdinfo")
    except OSError:
        return False
    for name in descriptors:
        try:
            text = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            key, _, value = line.partition(":")
            if key == "map_id" and int(value) in ids:
                return True
    return False


def _map_ids(folders: set[Path]) -> set[int]:
    found = set()
    for folder in folders:
        for name in maps.SHAPES:
            if (folder / name).exists():
                fd = bpf.get_pinned(str(folder / name))
                found.add(bpf.map_id(fd))
                os.close(fd)
    return found


# --- class set under load


def _under_load(ends: Pair, changes: int) -> tuple[list[float], int, int]:
    rates = random.Random(1)
    times = []
    with BulkLoad(ends, SENDS_PER_S) as load, ends.engine.session(ends.near.device) as session:
        for _ in range(changes):
            wanted = rates.randrange(1_100_000_000, 9_000_000_000)
            started = time.perf_counter()
            session.set_ceiling("bulk", wanted)
            times.append(time.perf_counter() - started)
    return times, load.sent, load.received


@row("class-set")
def class_set_under_load(options: Options) -> Sequence[Result]:
    """1,000 changes of bulk's ceiling while bulk passes below it; counted at both ends.

    Through one session, as a controller does; `shapectl class set` adds the
    start of a Python process.
    """
    changes = options.pick(CHANGES, 200)
    rounds = []
    lost = total = 0
    with pair() as ends, attached(ends, link_rate_bits_per_s=10_000_000_000, profile="htb"):
        for _ in range(options.pick(2, 1)):
            times, sent, received = _under_load(ends, changes)
            lost += sent - received
            total += sent
            rounds.append((sorted(times)[int(len(times) * 0.99)], median(times)))
        before = bulk_packets(ends)
    p99, p50 = min(rounds)
    assert before >= total, f"got {before} packets in class bulk, want at least {total}"
    return [
        Result(
            f"class set under load, {changes:,} times: packets lost",
            lost,
            "packets",
            target=0,
            note=f"{total:,} sent at {SENDS_PER_S:,}/s",
        ),
        Result(
            f"class set under load, {changes:,} times: p99",
            p99 * 1e3,
            "ms",
            target=2.0,
            note=f"p50 {p50 * 1e3:.2f} ms",
        ),
    ]
