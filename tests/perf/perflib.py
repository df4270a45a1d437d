# SPDX-License-Identifier: Apache-2.0
"""What every row needs: the shape of a row, a datapath without a device, and a stopwatch.

A row is a function that takes the run's options and gives back one or more
`Result`s. It is registered by `@row("name")` in a file `rows_<topic>.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeagent.kernel import abi, bpf
from shapeagent.kernel import compile as kernel_compile
from shapeagent.kernel import maps as kernel_maps
from shapeagent.kernel.compile import Image, LoadedProgram
from shapeagent.kernel.datapath import Control, Datapath
from shapeagent.kernel.headers import find_kernel_headers
from shapeagent.kernel.probe import ensure_bpffs, read_jiffy_ns, read_possible_cpus
from shapeagent.model.types import (
    DeviceFacts,
    Direction,
    IngressMode,
    KernelFacts,
    Match,
    Policy,
    Profile,
    WhitelistEntry,
)
from shapeagent.policy.rules import compile_rules
from shapeagent.service import documents
from shapeagent.service.records import (
    INSERTS_PER_S,
    Ceilings,
    class_record,
    config_record,
    rule_write,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

LINK_RATE_BITS_PER_S = 400_000_000_000  # so high that a test run stays within the budget
BATCH = 20_000  # packets per test run; its own cost, about 10 us, is the same for every program
PROG_ARRAY = 3  # BPF_MAP_TYPE_PROG_ARRAY
UNSPEC = bytes((0xB7, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0x95, 0, 0, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table.

    value: best of the repeats. target: what it must not exceed (or, with
    at_least, must reach); None = reported only. ratio: where given, it is
    what the gate looks at, and not the value.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False
    ratio: float | None = None
    ratio_target: float | None = None
    note: str = ""
    failure: str = ""  # a condition beside the target that does not hold

    @property
    def ok(self) -> bool:
        """Whether the gate is passed."""
        if self.failure:
            return False
        if self.ratio is not None and self.ratio_target is not None:
            return self.ratio <= self.ratio_target
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    quick: bool = False
    source: Path | None = None  # another copy of bpf/, for experiments

    def pick(self, full: int, quick: int) -> int:
        """Return how often to repeat: `full`, or `quick` under --quick."""
        return quick if self.quick else full


RowFunction = Callable[[Options], Sequence[Result]]
ROWS: dict[str, RowFunction] = {}


def row(name: str) -> Callable[[RowFunction], RowFunction]:
    """Register a function as the row `name`, which `--only` takes."""

    def register(function: RowFunction) -> RowFunction:
        assert name not in ROWS, f"two rows are called {name}"
        ROWS[name] = function
        return function

    return register


# --- packets


def tcp_frame(source: str, destination: str, sport: int, dport: int) -> bytes:
    """Return an Ethernet frame with a TCP ACK of 12 bytes; checksums are left zero."""
    address = bytes(int(part) for part in source.split(".")) + bytes(
        int(part) for part in destination.split(".")
    )
    payload = bytes(12)
    total = (40 + len(payload)).to_bytes(2, "big")
    ip = b"\x45\0" + total + b"\0\1\x40\0\x40\x06\0\0" + address
    tcp = sport.to_bytes(2, "big") + dport.to_bytes(2, "big") + bytes(8) + b"\x50\x10\x10\0"
    return bytes(12) + b"\x08\0" + ip + tcp + bytes(4) + payload


LOCAL = "192.0.2.1"
NORMAL = tcp_frame(LOCAL, "192.0.2.2", 40_000, 41_000)
STREAM = tcp_frame(LOCAL, "192.0.2.2", 8_000, 41_000)
SIGNAL = tcp_frame(LOCAL, "192.0.2.2", 40_000, 2_379)


# --- programs


def compile_text(text: str, programs: Sequence[str]) -> Image:
    """Return the image of another C text, compiled by the child that compiles ours."""
    request = {
        "text": text,
        "cflags": ["-Wno-unused-value", "-Wno-compare-distinct-pointer-types"],
        "programs": list(programs),
        "headers": str(find_kernel_headers()),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shapeagent.kernel.compile_child"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": "no answer"}
    if "error" in answer:
        raise RuntimeError(f"{answer}\n{done.stderr[-3000:]}")
    return kernel_compile._parse({**answer, "digest": "", "total_s": answer["compile_s"]})


def load_empty() -> int:
    """Return a program that does nothing: `return TC_ACT_UNSPEC`."""
    return bpf.load_program("perf_empty", UNSPEC)[0]


def tail_call_to(image: Image, name: str, target_fd: int, maps: Mapping[str, int]) -> int:
    """Return a wrapper program of `image` whose tail call goes to `target_fd`."""
    slot = bpf.create_map("perf_jump", bpf.MapShape(PROG_ARRAY, 4, 4, 1, 0))
    bpf.update(slot, bytes(4), target_fd.to_bytes(4, "little"))
    loaded = kernel_compile.load_image(image, {**maps, "jump": slot}, (name,))
    _KEPT.append(slot)  # the kernel empties a program array when its last descriptor closes
    return loaded[name].fd


_KEPT: list[int] = []


# --- a datapath without a device


@dataclass(slots=True)
class Bench:
    """Our loaded program with the built-in policy, attached to nothing."""

    datapath: Datapath
    programs: Mapping[str, LoadedProgram]
    policy: Policy
    folder: Path
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def egress(self) -> int:
        """The descriptor of the egress program."""
        return self.programs["shp_egress"].fd

    def close(self) -> None:
        """Close and unpin everything."""
        bpf.close_all([program.fd for program in self.programs.values()])
        bpf.close_all(list(self.datapath.maps.values()))
        kernel_maps.remove_pins(self.folder)

    def expect_only(self, code: str, run: Callable[[], object], *, class_name: str) -> None:
        """Check that `run` counts in one class, and mostly under one reason code."""
        number = self.numbers[class_name]
        before = self.datapath.count(0, number).packets
        run()
        counted = self.datapath.count(0, number).packets - before
        reasons = self.datapath.reasons(0)
        assert counted >= BATCH, f"{class_name}: got {counted} packets, want {BATCH}: {reasons}"
        assert reasons.get(code), f"got reasons {reasons}, want {code}"


def open_bench(folder: Path | None = None) -> Bench:
    """Return a bench. `folder`: another copy of bpf/, for experiments."""
    ensure_bpffs()
    cache = kernel_compile.CACHE_DIR
    image, _ = kernel_compile.find_image(folder=folder, cache_dir=cache)
    pins = Path("/sys/fs/bpf") / f"shp_perf_{os.getpid()}_{time.monotonic_ns()}"
    maps = kernel_maps.create_pinned(pins)
    try:
        programs = kernel_compile.load_image(image, maps)
    except BaseException:
        bpf.close_all(list(maps.values()))
        kernel_maps.remove_pins(pins)
        raise
    text, source = documents.example_policy_text(), "built-in"
    policy = documents.load_policy_text(text, source, LINK_RATE_BITS_PER_S)
    kernel = KernelFacts(os.uname().release, frozenset(), read_jiffy_ns(), read_possible_cpus())
    device = DeviceFacts("perf", 1, "veth", False, 1500, 1, True, None, 65_536, 65_535, 65_536)
    datapath = Datapath(maps, kernel.possible_cpus)
    config = config_record(
        policy,
        device,
        kernel,
        profile=Profile.HTB,
        ingress=IngressMode.COUNT,
        segment_limit_bytes=0,
        cgroup_levels=0,
    )
    datapath.write_config(config)
    for traffic_class in policy.classes:
        rates = Ceilings(traffic_class.ceiling_bits_per_s, traffic_class.safe_ceiling_bits_per_s)
        for direction in Direction:
            record = class_record(
                policy,
                traffic_class,
                direction,
                rates,
                kernel=kernel,
                link_rate_bits_per_s=LINK_RATE_BITS_PER_S,
                tree=None,
                metered=False,
            )
            datapath.write_class(direction.number, traffic_class.number, record)
    write, _levels, _missing = rule_write(compile_rules(policy), lambda _path: None)
    datapath.write_control(Control())
    datapath.replace_rules(write)
    return Bench(datapath, programs, policy, pins, {c.name: c.number for c in policy.classes})


def ship_insert_limit(bench: Bench) -> None:
    """Set the insert limit back to what `records.config_record` writes."""
    config = bench.datapath.read_config()
    config.insert_limit = INSERTS_PER_S
    config.insert_window_jiffies = round(1e9 / config.tick_ns)
    bench.datapath.write_config(config)


def lift_insert_limit(bench: Bench) -> None:
    """Let every new flow into the cache, so that its insert is part of what is measured."""
    config = bench.datapath.read_config()
    config.insert_limit = 0xFFFFFFFF
    config.insert_window_jiffies = 1 << 40  # one window: it counts the inserts of a run
    bench.datapath.write_config(config)


def inserted_flows(bench: Bench) -> int:
    """Return how many flows were put into the cache since the limit was lifted."""
    cpus = read_possible_cpus()
    return kernel_maps.read_percpu_u64(bench.datapath.maps["inserts"], 0, 2, cpus)[1]


def host_entry(address: int, match: Match = Match.DESTINATION, bits: int = 32) -> WhitelistEntry:
    """Return a whitelist entry for an IPv4 address in class stream."""
    return WhitelistEntry(match, "stream", destination=(address.to_bytes(4, "big"), bits))


# --- stopwatch


def batch_ns(fd: int, frame: bytes, repeat: int = BATCH) -> float:
    """Return the time per packet of one test run, by the clock around the call.

    The kernel's own figure is a whole number of ns, too coarse for a ratio of
    two of 30.
    """
    started = time.perf_counter_ns()
    bpf.run_program(fd, frame, repeat=repeat)
    return (time.perf_counter_ns() - started) / repeat


def fastest_ns(
    runs: Mapping[str, tuple[int, bytes]], *, batches: int, repeat: int = BATCH
) -> dict[str, float]:
    """Return for each run the fastest batch, ns per packet.

    Batches of all runs alternate, so that the same other load meets each;
    the fastest of many short ones is that which nothing disturbed.
    """
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(batches):
        for name, (fd, frame) in runs.items():
            best[name] = min(best[name], batch_ns(fd, frame, repeat))
    return best


def median(values: Sequence[float]) -> float:
    """Return the middle value; of an even number the lower of the two."""
    return sorted(values)[(len(values) - 1) // 2]


__all__ = [
    "BATCH",
    "HERE",
    "LINK_RATE_BITS_PER_S",
    "LOCAL",
    "NORMAL",
    "ROOT",
    "ROWS",
    "SIGNAL",
    "STREAM",
    "Bench",
    "Options",
    "Result",
    "abi",
    "batch_ns",
    "compile_text",
    "fastest_ns",
    "host_entry",
    "inserted_flows",
    "lift_insert_limit",
    "load_empty",
    "median",
    "open_bench",
    "row",
    "tail_call_to",
    "tcp_frame",
]
