# SPDX-License-Identifier: Apache-2.0
"""Engines with folders of their own, traffic that counts itself, and host states to compare."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from netlab import VethPair, changes, ip, note_change, tc

from shapeagent.kernel import bpf, filters, link, maps, qdisc, tcx
from shapeagent.kernel import rtnl as rtnl_module
from shapeagent.kernel.netns import open_rtnl, run_in_netns
from shapeagent.model.reports import AttachReport, AttachRequest, ClassStatus, InterfaceStatus
from shapeagent.model.types import Direction, WhitelistEntry
from shapeagent.policy.builtin import default_policy_text
from shapeagent.policy.whitelist import LineDefaults, parse_entry
from shapeagent.service.engine import Engine

MBIT = 1_000_000
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETHERNET_BYTES = 14
WIRE_EXTRA_BYTES = 24
UDP4_HEADERS_BYTES = ETHERNET_BYTES + 20 + 8
TCP4_HEADERS_BYTES = ETHERNET_BYTES + 20 + 20 + 12  # with time stamps
SIGNAL_UDP, SIGNAL_TCP, STREAM_TCP, BULK, NORMAL = 123, 2379, 8000, 2049, 7777

_T = TypeVar("_T")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Return once `condition` holds. Fails at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"got no end of waiting, want {what}"
        pause(0.005)


def wait_growth(meter: Callable[[], int], least: int, what: str) -> None:
    """Return once a counter has grown by more than `least` from now on."""
    begin = meter()
    wait_until(lambda: meter() > begin + least, what)


def pause(seconds: float) -> None:
    """Let traffic run for a part of its measurement window."""
    select.select([], [], [], seconds)


# --- engines


@dataclass(frozen=True, slots=True)
class HostState:
    """What attach may change and detach must put back."""

    tree: qdisc.TreeSnapshot
    filters: tuple[filters.FilterInfo, ...]
    tcx: tuple[str, ...]  # "egress 51 shp_egress"
    gso: object
    links: tuple[str, ...]
    routes6: tuple[str, ...]
    pins: tuple[str, ...]
    states: tuple[str, ...]
    residue: tuple[str, ...]

    @property
    def ours(self) -> tuple[str, ...]:
        """What stands on the hooks and is ours: filters and links."""
        names = [str(one) for one in self.filters if one.in_our_slot or one.in_redirect_slot]
        return (*names, *(one for one in self.tcx if " shp_" in one))


@dataclass
class Bench:
    """An engine on one device of one namespace."""

    engine: Engine
    netns: str
    device: str
    pair: VethPair
    hook: str | None = None
    before: tuple[object, ...] | None = None  # what stood there before the last attach
    program_ids: set[int] = field(default_factory=set)
    map_ids: set[int] = field(default_factory=set)

    def glance(self) -> tuple[object, ...]:
        """Return what a detach must put back on the device; see `check_put_back`."""
        with open_rtnl(self.netns) as rtnl:
            index = link.read_device(rtnl, self.device).index
            return (
                index,
                qdisc.dump_tree(rtnl, index),
                link.read_gso(rtnl, index),
                *(filters.list_filters(rtnl, index, one) for one in Direction),
                *(tcx.list_programs(self.netns, index, one) for one in Direction),
                changes(self.netns),
            )

    def check_put_back(self) -> None:
        """Detach what a test left attached, and fail unless all is as it was before the attach.

        Where the test itself changed something there meanwhile, nothing is compared.
        """
        before, self.before = self.before, None
        if before is None or changes(self.netns) != before[-1]:
            return
        self.engine.detach(self.device)
        found = self.glance()
        assert found == before, f"got {found} after detach, want {before}"

    def attach(self, **options: Any) -> AttachReport:
        """Attach with a link of 100 Mbit/s unless told otherwise."""
        if not any((self.pins.exists(), (self.engine.run_dir / self.key / "state.json").exists())):
            self.before = self.glance()
        options.setdefault("link_rate_bits_per_s", 100 * MBIT)
        options.setdefault("hook", self.hook)
        report = self.engine.attach(AttachRequest(device=self.device, **options))
        self.program_ids |= set(self.state()["program_ids"].values())
        self.map_ids |= pinned_map_ids(self.pins)
        return report

    @property
    def index(self) -> int:
        return index_of(self.netns, self.device)

    @property
    def key(self) -> str:
        with open_rtnl(self.netns) as rtnl:
            return self.engine.key_of(rtnl, self.index)

    @property
    def pins(self) -> Path:
        return self.engine.bpffs_dir / self.key

    def state(self) -> dict[str, Any]:
        """Return the state file as JSON."""
        path = self.engine.run_dir / self.key / "state.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def change_state(self, **fields: Any) -> None:
        """Write the state with other values, as another version or a killed process would."""
        store = self.engine.store(self.key)
        state = store.read()
        assert state is not None, "got no state, want one"
        store.write(dataclasses.replace(state, **fields))

    def forget_kept(self) -> None:
        """Remove the kernel's copies of the state files: an attachment of an older version."""
        self.before = None  # nobody knows then what stood there
        for pin in self.pins.glob("kept_*"):
            pin.unlink()

    def status(self) -> InterfaceStatus:
        return self.engine.status(self.device)[0]

    def classes(self, direction: str = "egress") -> dict[str, ClassStatus]:
        return {one.name: one for one in self.status().classes if one.direction == direction}

    def packets(self, direction: str = "egress") -> dict[str, int]:
        """Return class → packets, classes without any left out."""
        return {name: one.packets for name, one in self.classes(direction).items() if one.packets}

    def reasons(self, direction: str = "egress") -> dict[str, int]:
        return self.status().reasons[direction]

    def host_state(self) -> HostState:
        return host_state(self.netns, self.device, self.engine, self.program_ids, self.map_ids)

    def check_programs_gone(self) -> None:
        """Fail unless the kernel has freed every program that was attached here."""
        wait_until(
            lambda: not (self.program_ids & loaded_programs()),
            f"programs {sorted(self.program_ids)} to be freed",
        )


def add_bpf_filter(
    netns: str, device: str, direction: Direction, descriptor: int, *, pref: int, handle: int = 1
) -> None:
    """Add a bpf filter of someone else's at clsact, and clsact if need be. Raises OSError."""
    if "clsact" not in tc("qdisc", "show", "dev", device, netns=netns):
        tc("qdisc", "add", "dev", device, "clsact", netns=netns)
    note_change(netns)
    options = rtnl_module.nested(
        rtnl_module.TCA_OPTIONS,
        rtnl_module.attribute_u32(6, descriptor),  # TCA_BPF_FD
        rtnl_module.attribute_text(7, "foreign"),
        rtnl_module.attribute_u32(8, 1),  # TCA_BPF_FLAG_ACT_DIRECT
    )
    body = rtnl_module.build_tc(
        index_of(netns, device),
        rtnl_module.attribute_text(rtnl_module.TCA_KIND, "bpf"),
        options,
        handle=handle,
        parent=0xFFFFFFF3 if direction is Direction.EGRESS else 0xFFFFFFF2,
        info=pref << 16 | socket.htons(3),  # ETH_P_ALL
    )
    with open_rtnl(netns) as rtnl:
        rtnl.request(44, 0x600, body)  # RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_EXCL


def index_of(netns: str, device: str) -> int:
    with open_rtnl(netns) as rtnl:
        return link.read_device(rtnl, device).index


def pinned_map_ids(pins: Path) -> set[int]:
    """Return the ids of the maps in a pin folder."""
    with contextlib.closing(maps.PinnedMaps(pins)) as opened:
        return {bpf.map_id(opened[name]) for name in opened}


def residue_of(
    engine: Engine, program_ids: Collection[int] = (), map_ids: Collection[int] = ()
) -> tuple[str, ...]:
    """Return what `shapectl residue` lists, of programs and maps only these.

    Other tests may run on this machine, and the kernel is one. Of maps also
    those that no program holds, after a while in which the kernel may free them.
    """
    ours = {"program": program_ids, "map": map_ids}

    def look() -> tuple[bool, tuple[str, ...]]:
        report = engine.residue(wait_s=0)
        found = [one for one in report.items if one.kind not in ours or one.id in ours[one.kind]]
        texts = [f"{one.kind}: {one.what}" for one in found]
        held = report.attached or any(one.kind in ("state", "pin", "filter") for one in found)
        if not held:
            known = {one.id for one in found if one.kind == "map"}
            left = set(map_ids) & loaded_maps() - known
            texts += [f"map: {one} without a program" for one in sorted(left)]
        going = any(text.startswith(("program:", "map:")) for text in texts)
        return not held and going, tuple(texts)

    deadline_s = time.monotonic() + 5
    while True:
        freeing, found = look()
        if not freeing or time.monotonic() > deadline_s:
            return found
        pause(0.01)


def host_state(
    netns: str,
    device: str,
    engine: Engine,
    program_ids: Collection[int] = (),
    map_ids: Collection[int] = (),
) -> HostState:
    """Return everything of a device and an engine's folders that must not change for good."""
    residue = residue_of(engine, program_ids, map_ids)
    with open_rtnl(netns) as rtnl:
        index = link.read_device(rtnl, device).index
        found = tuple(
            one for direction in Direction for one in filters.list_filters(rtnl, index, direction)
        )
        return HostState(
            tree=qdisc.dump_tree(rtnl, index),
            filters=found,
            tcx=tuple(
                f"{direction.value} {bpf.program_text(number)}"
                for direction in Direction
                for number in tcx.list_programs(netns, index, direction)
            ),
            gso=link.read_gso(rtnl, index),
            links=tuple(sorted(one.name for one in link.list_devices(rtnl))),
            routes6=_routes6(netns),
            pins=_names(engine.bpffs_dir),
            states=tuple(name for name in _names(engine.run_dir) if name != "lock"),
            residue=residue,
        )


def _routes6(netns: str) -> tuple[str, ...]:
    """Return the IPv6 routes, without the link-local ones that come and go by themselves."""
    lines = ip("-6", "route", "show", "table", "all", netns=netns).splitlines()
    return tuple(sorted(line for line in lines if "fe80:" not in line))


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(os.listdir(folder))) if folder.exists() else ()


def loaded_programs() -> set[int]:
    """Return the ids of all programs in the kernel."""
    return set(bpf.program_ids())


def loaded_maps() -> set[int]:
    """Return the ids of all maps in the kernel, without opening them."""
    return set(bpf.map_ids())


@contextlib.contextmanager
def engine_for(netns: str, folder: Path, **options: Any) -> Iterator[Engine]:
    """Give an engine with private folders; what it left attached is detached."""
    bpffs = Path("/sys/fs/bpf") / f"shp-{secrets.token_hex(4)}"
    engine = Engine(netns=netns, run_dir=folder / bpffs.name, bpffs_dir=bpffs, **options)
    try:
        yield engine
    finally:
        for state in engine.run_dir.glob("*/state.json"):
            with contextlib.suppress(Exception):
                engine.detach(json.loads(state.read_text())["device"])
        for pins in bpffs.glob("*"):
            for pin in pins.iterdir():
                pin.unlink()
            pins.rmdir()
        if bpffs.exists():
            bpffs.rmdir()
        shutil.rmtree(engine.run_dir, ignore_errors=True)


# --- the command line


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    entries = [entry for entry in sys.path if entry]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries), **more}


def shapectl(
    *arguments: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
) -> Ran:
    """Return what `shapectl ARGUMENTS` did, as a process of its own."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "shapectl", *arguments],
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


# --- sockets


def open_socket(
    netns: str, family: int = socket.AF_INET, kind: int = socket.SOCK_DGRAM, protocol: int = 0
) -> socket.socket:
    """Return a socket that belongs to the namespace, whoever uses it."""
    return run_in_netns(netns, lambda: socket.socket(family, kind, protocol))


def send_datagrams(
    pair: VethPair, port: int, count: int, *, size: int = 64, v6: bool = False, options: Any = ()
) -> None:
    """Send UDP datagrams from the device under test to its peer."""
    family = socket.AF_INET6 if v6 else socket.AF_INET
    with contextlib.closing(open_socket(pair.netns, family)) as sender:
        for level, name, value in options:
            sender.setsockopt(level, name, value)
        sender.connect((pair.peer_address6 if v6 else pair.peer_address4, port))
        sent = 0
        while sent < count:
            with contextlib.suppress(ConnectionRefusedError):  # news of an earlier datagram
                sender.send(bytes(size))
                sent += 1


class Worker:
    """A thread of traffic; it ends when told, and hands on what went wrong."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            if not self.stop.is_set():
                self.error = error

    def work(self) -> None:
        raise NotImplementedError

    def __enter__(self: _W) -> _W:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.stop.set()
        self.close()
        self.thread.join(10)
        assert not self.thread.is_alive(), "got a traffic thread that does not end"
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Close what the thread may be waiting for."""


_W = TypeVar("_W", bound=Worker)


class UdpSink(Worker):
    """Counts numbered datagrams: how many, how many after a later one, and their delays."""

    def __init__(self, netns: str, port: int, *, v6: bool = False, timing: bool = False) -> None:
        super().__init__()
        self.socket = open_socket(netns, socket.AF_INET6 if v6 else socket.AF_INET)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 23)
        self.socket.bind(("::" if v6 else "0.0.0.0", port))
        self.socket.settimeout(0.1)
        self.timing = timing
        self.received = 0
        self.bytes = 0
        self.inversions = 0
        self.highest = -1
        self.delays_us: list[float] = []
        self.arrivals: list[tuple[float, int]] = []

    def work(self) -> None:
        buffer = bytearray(65536)
        unpack = struct.Struct("=qd").unpack_from
        while not self.stop.is_set():
            try:
                size = self.socket.recv_into(buffer)
            except TimeoutError:
                continue
            sequence, sent_s = unpack(buffer)
            if sequence < self.highest:
                self.inversions += 1
            else:
                self.highest = sequence
            self.bytes += size
            self.received += 1
            if self.timing:
                self.delays_us.append((time.monotonic() - sent_s) * 1e6)

    def close(self) -> None:
        self.thread.join(1)
        self.socket.close()

    def wire_bits(self) -> int:
        per_frame = UDP4_HEADERS_BYTES + WIRE_EXTRA_BYTES
        return 8 * (self.bytes + self.received * per_frame)


class UdpSource(Worker):
    """Sends numbered datagrams at a pace of wire bits, or of packets."""

    def __init__(
        self,
        netns: str,
        target: tuple[str, int],
        *,
        bits_per_s: float = 0,
        packets_per_s: float = 0,
        size: int = 1400,
        options: Any = (),
        limit: int | None = None,
    ) -> None:
        super().__init__()
        v6 = ":" in target[0]
        self.socket = open_socket(netns, socket.AF_INET6 if v6 else socket.AF_INET)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 1 << 23)
        for level, name, value in options:
            self.socket.setsockopt(level, name, value)
        self.socket.connect(target)
        self.size = size
        self.sent = 0
        self.limit = limit
        wire = 8 * (size + UDP4_HEADERS_BYTES + WIRE_EXTRA_BYTES)
        self.interval_s = wire / bits_per_s if bits_per_s else 1 / packets_per_s

    def work(self) -> None:
        filler = bytes(self.size - 16)
        pack = struct.Struct("=qd").pack
        next_s = time.monotonic()
        while not self.stop.is_set() and (self.limit is None or self.sent < self.limit):
            now_s = time.monotonic()
            if now_s < next_s:
                self.stop.wait(next_s - now_s)
                continue
            if now_s - next_s > 0.05:  # this thread was held up: do not burst
                next_s = now_s
            try:
                self.socket.send(pack(self.sent, time.monotonic()) + filler)
            except (ConnectionRefusedError, BlockingIOError):
                continue
            self.sent += 1
            next_s += self.interval_s

    def close(self) -> None:
        self.thread.join(2)
        self.socket.close()


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Fields of struct tcp_info (include/uapi/linux/tcp.h)."""

    retransmits: int
    bytes_received: int
    data_segments_in: int
    delivered_ce: int
    out_of_order: int
    bytes_retransmitted: int
    reorders_seen: int


def tcp_info(connection: socket.socket) -> TcpInfo:
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256).ljust(256, b"\0")

    def u32(offset: int) -> int:
        return int(struct.unpack_from("=I", raw, offset)[0])

    def u64(offset: int) -> int:
        return int(struct.unpack_from("=Q", raw, offset)[0])

    return TcpInfo(u32(100), u64(128), u32(152), u32(196), u32(224), u64(208), u32(220))


class TcpFlow(Worker):
    """One connection from `source` to `target`: bytes as fast as they go, or at a pace."""

    def __init__(
        self,
        source: str,
        sink: str,
        address: str,
        port: int,
        *,
        bits_per_s: float = 0,
        options: Any = (),
        chunk: int = 65536,
    ) -> None:
        super().__init__()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = open_socket(sink, family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1)
        self.sender = open_socket(source, family, socket.SOCK_STREAM)
        for level, name, value in options:
            self.sender.setsockopt(level, name, value)
        self.sender.settimeout(5)
        self.sender.connect((address, port))
        self.receiver, _ = listener.accept()
        listener.close()
        self.sender.settimeout(0.2)
        self.receiver.settimeout(0.2)
        self.bits_per_s = bits_per_s
        self.chunk = chunk
        self.reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> TcpFlow:
        self.reader.start()
        return super().__enter__()

    def work(self) -> None:
        data = memoryview(bytes(self.chunk))
        next_s = time.monotonic()
        while not self.stop.is_set():
            if self.bits_per_s:
                self.stop.wait(max(0.0, next_s - time.monotonic()))
                next_s += 8 * self.chunk / self.bits_per_s
            left = data
            while left and not self.stop.is_set():
                with contextlib.suppress(TimeoutError):
                    left = left[self.sender.send(left) :]

    def _read(self) -> None:
        buffer = bytearray(1 << 18)
        while not self.stop.is_set():
            try:
                if not self.receiver.recv_into(buffer):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    def close(self) -> None:
        self.thread.join(5)
        if self.reader.is_alive():
            self.reader.join(5)
        self.sender.close()
        self.receiver.close()

    def info(self) -> TcpInfo:
        """Return the receiver's view."""
        return tcp_info(self.receiver)

    def wire_bits(self) -> int:
        found = self.info()
        per_frame = TCP4_HEADERS_BYTES + WIRE_EXTRA_BYTES
        return 8 * (found.bytes_received + found.data_segments_in * per_frame)


def rate_of(meter: Callable[[], int], window_s: float) -> float:
    """Return how fast a counter of bits grew over a window."""
    before, begin_s = meter(), time.monotonic()
    pause(window_s)
    after, end_s = meter(), time.monotonic()
    return (after - before) / (end_s - begin_s)


def steady_rate(
    meter: Callable[[], int], want: float, share: float, *, window_s: float = 1.0, tries: int = 3
) -> float:
    """Return a rate within `share` of `want`, else the last of `tries` windows.

    A window in which this shared machine stopped the sender says nothing; one
    above the ceiling does, and is never tried again.
    """
    got = 0.0
    for _ in range(tries):
        got = rate_of(meter, window_s)
        if got > want * (1 - share):
            break
    return got


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def policy_text(changes: Callable[[str], str]) -> str:
    """Return the built-in policy, edited."""
    text = default_policy_text()
    edited = changes(text)
    assert edited != text, "got a policy that the edit did not change"
    return edited


def write_policy(folder: Path, changes: Callable[[str], str]) -> str:
    """Return the path of a file with the built-in policy, edited."""
    path = folder / f"policy-{secrets.token_hex(4)}.toml"
    path.write_text(policy_text(changes))
    return str(path)


def add_rules(*rules: str) -> Callable[[str], str]:
    """Return an edit that puts rules in front of all others."""
    text = "".join(f"[[rules]]\n{rule}\n\n" for rule in rules)
    return lambda policy: policy.replace("[[rules]]", text + "[[rules]]", 1)


def entry(text: str, name: str = "stream", **changes: Any) -> WhitelistEntry:
    """Return the whitelist entry of a line; it names the other end unless told otherwise."""
    found, _ = parse_entry(text, LineDefaults(traffic_class=name))
    return dataclasses.replace(found, **changes)


# --- programs of someone else


def _instruction(code: int, registers: int, offset: int, value: int) -> bytes:
    return struct.pack("<BBhi", code, registers, offset, value)


def load_counter(*, returns: int = -1, mark: int | None = None) -> tuple[int, int]:
    """Return (program, map): a filter that counts packets, those with a mark if one is given."""
    counter = bpf.create_map("count", bpf.MapShape(bpf.MapType.ARRAY, 4, 8, 1, 0))
    code = b""
    if mark is not None:
        code += _instruction(0x61, 0x17, 8, 0)  # r7 = skb->mark
        code += _instruction(0x55, 0x07, 9, mark)  # unless equal: to the end
    code += _instruction(0x18, 0x11, 0, counter) + _instruction(0, 0, 0, 0)  # r1 = map
    code += _instruction(0x62, 0x0A, -4, 0)  # key 0 on the stack
    code += _instruction(0xBF, 0xA2, 0, 0) + _instruction(0x07, 0x02, 0, -4)  # r2 = its address
    code += _instruction(0x85, 0, 0, 1)  # bpf_map_lookup_elem
    code += _instruction(0x15, 0x00, 2, 0)  # none: to the end
    code += _instruction(0xB7, 0x01, 0, 1) + _instruction(0xDB, 0x10, 0, 0)  # atomic add 1
    code += _instruction(0xB7, 0x00, 0, returns) + _instruction(0x95, 0, 0, 0)
    program, _log = bpf.load_program("counter", code)
    return program, counter


def read_counter(counter: int) -> int:
    value = bpf.lookup(counter, bytes(4), 8)
    assert value is not None
    return int(struct.unpack("=Q", value)[0])


def load_vlan_push(*tags: tuple[int, int]) -> int:
    """Return a filter that puts VLAN tags on, the outer one last; it stays in the metadata."""
    code = _instruction(0xBF, 0x16, 0, 0)  # r6 = skb
    for protocol, tci in tags:
        code += _instruction(0xBF, 0x61, 0, 0)
        code += _instruction(0xB7, 0x02, 0, socket.htons(protocol))
        code += _instruction(0xB7, 0x03, 0, tci)
        code += _instruction(0x85, 0, 0, 18)  # bpf_skb_vlan_push
    code += _instruction(0xB7, 0x00, 0, -1) + _instruction(0x95, 0, 0, 0)
    program, _log = bpf.load_program("push", code)
    return program


class TxRing:
    """An AF_PACKET ring: the packets it sends have only the Ethernet header in the linear area."""

    FRAME_BYTES = 2048
    _DATA = 32  # TPACKET2_HDRLEN - sizeof(struct sockaddr_ll)

    def __init__(self, netns: str, device: str) -> None:
        self.socket = open_socket(netns, socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(263, 10, struct.pack("=i", 1))  # PACKET_VERSION, TPACKET_V2
        request = struct.pack("=4I", 4096, 1, self.FRAME_BYTES, 2)
        self.socket.setsockopt(263, 13, request)  # PACKET_TX_RING
        self.socket.bind((device, 3))
        self.ring = mmap.mmap(self.socket.fileno(), 4096)
        self.next = 0

    def send(self, frame: bytes) -> None:
        start = self.next * self.FRAME_BYTES
        self.next = (self.next + 1) % 2
        self.ring[start + self._DATA : start + self._DATA + len(frame)] = frame
        self.ring[start + 4 : start + 8] = struct.pack("=I", len(frame))
        self.ring[start : start + 4] = struct.pack("=I", 1)  # TP_STATUS_SEND_REQUEST
        self.socket.send(b"")

    def close(self) -> None:
        self.ring.close()
        self.socket.close()


def dump_maps(pins: Path, cpus: int, *, without: tuple[str, ...] = ()) -> dict[str, object]:
    """Return the whole content of every pinned map, lists inside arrays of maps too."""
    found: dict[str, object] = {}
    for path in sorted(pins.iterdir()):
        if path.name not in maps.SHAPES or path.name in without:
            continue
        descriptor = bpf.get_pinned(str(path))
        try:
            found[path.name] = _dump_map(descriptor, cpus)
        finally:
            os.close(descriptor)
    return found


def _dump_map(descriptor: int, cpus: int) -> object:
    shape = bpf.map_shape(descriptor)
    size = shape.value_bytes
    if shape.type == bpf.MapType.PERCPU_ARRAY:
        size = (size + 7) // 8 * 8 * cpus
    if shape.type == bpf.MapType.ARRAY:
        return _dump_array(descriptor, shape)
    rows = sorted(bpf.iterate(descriptor, shape.key_bytes, size))
    if shape.type != bpf.MapType.ARRAY_OF_MAPS:
        return rows
    inner: list[object] = []
    for _, value in rows:
        one = bpf.map_by_id(struct.unpack("=I", value)[0])
        inner.append(_dump_map(one, cpus))
        os.close(one)
    return inner


def _dump_array(descriptor: int, shape: bpf.MapShape) -> bytes:
    """Return all values of an array by one BPF_MAP_LOOKUP_BATCH."""
    keys = ctypes.create_string_buffer(4 * shape.max_entries)
    values = ctypes.create_string_buffer(shape.value_bytes * shape.max_entries)
    place = ctypes.create_string_buffer(8)
    addresses = [ctypes.addressof(one) for one in (place, keys, values)]
    attr = bytearray(
        struct.pack("=QQQQIIQQ", 0, *addresses, shape.max_entries, descriptor, 0, 0)
    ).ljust(128, b"\0")
    with contextlib.suppress(FileNotFoundError):  # the end of the map
        bpf.bpf_call(24, attr)
    count = struct.unpack_from("=I", attr, 32)[0]
    assert count == shape.max_entries, f"got {count} entries, want {shape.max_entries}"
    return values.raw


def receive_in_order(netns: str, device: str) -> None:
    """Let one CPU receive everything on a veth.

    Else each packet is received by the CPU that sent it, and a sender or timer that moves to
    another CPU reorders packets that the shaper kept in order.
    """
    script = f"for q in /sys/class/net/{device}/queues/rx-*; do echo 1 > $q/rps_cpus; done"
    subprocess.run(["ip", "netns", "exec", netns, "sh", "-c", script], check=True, timeout=10)


def mark_not_drop(one: Bench) -> None:
    """Let TCP ask for marks: what fq_codel drops is sent again, and arrives out of order too."""
    for netns in (one.netns, one.pair.peer_netns):
        set_sysctl(netns, "net.ipv4.tcp_ecn", "1")


def set_sysctl(netns: str, name: str, value: str) -> None:
    """Set a sysctl of a namespace of ours."""

    def write() -> None:
        # the namespace of the thread that opens it decides what /proc/sys/net shows
        Path("/proc/sys", *name.split(".")).write_text(value)

    run_in_netns(netns, write)
