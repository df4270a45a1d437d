# SPDX-License-Identifier: Apache-2.0
"""The jobs of the scale curves: one policy, as ours and as tc filters, and packets for it. Pure.

A job says which packet belongs to which class. All classifiers get the same
packets and must reach the same classes of the same HTB tree.
"""

from __future__ import annotations

import math
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shapeagent.model.errors import InputError

SHAPECTL = "shapectl"
SHAPECTL_FIRST = "shapectl-first"  # each packet is the first of its flow
U32 = "u32"
U32_HASHED = "u32-hashed"
FLOWER = "flower"
CLASSIFIERS: Mapping[str, str] = {
    SHAPECTL: "our program, packets of flows that it knows",
    SHAPECTL_FIRST: "our program, each packet the first of its flow",
    U32: "cls_u32, one list",
    U32_HASHED: "cls_u32, 256 buckets by one byte",
    FLOWER: "cls_flower",
}
POINTS: Mapping[str, tuple[int, ...]] = {
    "prefixes": (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000),
    "flows": (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000),
    "rules": (1, 16, 64, 256, 1_024, 4_096),
    "classes": (2, 4, 8, 16),
}
HIGHEST: Mapping[str, int] = {
    "prefixes": 1_000_000,
    "flows": 1_000_000,
    "rules": 4_096,
    "classes": 16,
}

TREE = "5348:"  # the handle of our HTB tree
CLASSES = 4
RULES = 16
SAMPLE_PACKETS = 4_096
PREFIX_BASE = 0x0B00_0000  # 11.0.0.0; each entry lies in a /24 of its own
PREFIX_LENGTHS = tuple(range(24, 32))  # more than our hashes take: the trie is what is measured
RULE_PORT = 10_000
NO_RULE_PORT = 9
NOBODY = 0xC612_0109  # 198.18.1.9
SOURCE_BASE = 0x0A00_0000  # 10.0.0.0: one address for each flow
FIRST_FLOW = 8_000_000  # flows from here on are sent once
SOURCE_PORT = 40_000
FILTERS_PER_TABLE = 4_000  # of cls_u32: 12 bits of a handle, 0 and 0x800 up are taken

# To a MAC that is nobody's: the peer drops what arrives before it looks at the address.
_ETHERNET = bytes.fromhex("020000005348") + bytes.fromhex("020000005349") + b"\x08\x00"
# Version, length 46, no fragment, TTL 64, UDP; no checksum, which nobody on the way reads.
_IPV4 = struct.pack(">BBHHHBBH", 0x45, 0, 46, 0, 0, 64, 17, 0)
_ENDS = struct.Struct(">IIHHHH")
_PADDING = bytes(18)


@dataclass(frozen=True, slots=True)
class Job:
    """What is classified at one point of a curve."""

    curve: str
    n: int
    classes: int = CLASSES
    rules: int = 0
    prefixes: int = 0
    flows: int = SAMPLE_PACKETS

    def entry_of(self, flow: int) -> int:
        """Return the number of the prefix or rule that decides a flow, all in turn."""
        count = self.prefixes or self.rules
        return flow * _step(count) % count

    def class_of(self, flow: int) -> int:
        """Return the number of a flow's class."""
        return self.entry_of(flow) % self.classes

    def frame(self, flow: int) -> bytes:
        """Return the packet of a flow: Ethernet, IPv4, UDP, 60 bytes."""
        entry = self.entry_of(flow)
        address = prefix_address(entry) if self.prefixes else NOBODY
        port = NO_RULE_PORT if self.prefixes else RULE_PORT + entry
        ends = _ENDS.pack(SOURCE_BASE + flow, address, SOURCE_PORT, port, 26, 0)
        return _ETHERNET + _IPV4 + ends + _PADDING

    def sample(self, turn: int) -> list[int]:
        """Return the flows of one round of packets, the same for each classifier."""
        if self.flows <= SAMPLE_PACKETS:
            return [number % self.flows for number in range(SAMPLE_PACKETS)]
        return random.Random(turn).choices(range(self.flows), k=SAMPLE_PACKETS)  # noqa: S311

    def classes_of(self, flows: Sequence[int]) -> Counter[int]:
        """Return how many packets of these flows each class gets."""
        return Counter(self.class_of(flow) for flow in flows)


def _step(count: int) -> int:
    """Return a stride that visits all of `count` and never two neighbours in a row."""
    step = max(1, int(count * 0.618))
    while math.gcd(step, count) != 1:
        step += 1
    return step


def job_at(curve: str, n: int) -> Job:
    """Return the job of one point. Raises InputError (bench-curve-unknown, bench-point-invalid)."""
    if curve not in POINTS:
        raise InputError(
            "bench-curve-unknown",
            f"There is no curve {curve!r}.",
            hint=f"one of: {', '.join(POINTS)}",
        )
    lowest = POINTS[curve][0]
    if not lowest <= n <= HIGHEST[curve]:
        raise InputError(
            "bench-point-invalid", f"{n} {curve}: from {lowest} to {HIGHEST[curve]:,} can be tried."
        )
    if curve == "prefixes":
        return Job(curve, n, prefixes=n)
    if curve == "flows":
        return Job(curve, n, rules=RULES, flows=n)
    if curve == "rules":
        return Job(curve, n, rules=n)
    return Job(curve, n, classes=n, rules=RULES)


def stages_of(points: Mapping[str, Sequence[int]]) -> list[list[Job]]:
    """Return the jobs, those of one policy together. Raises as `job_at`."""
    stages: list[list[Job]] = []
    for curve, numbers in points.items():
        jobs = [job_at(curve, n) for n in sorted(set(numbers))]
        stages += [jobs] if curve in ("prefixes", "flows") else [[job] for job in jobs]
    return [stage for stage in stages if stage]


def policy_text(classes: int, rules: int) -> str:
    """Return the policy of a job: classes c0, c1, ..., and one UDP port a rule."""
    lines = ["version = 1", 'default_class = "c1"', 'control_class = "c0"', 'segment_limit = "off"']
    for number in range(classes):
        lines += [
            f"[classes.c{number}]",
            f"priority = {min(number, 7)}",
            f'guarantee = "{80 // classes}%"',
        ]
    for number in range(rules):
        lines += [
            "[[rules]]",
            f'name = "r{number}"',
            f'class = "c{number % classes}"',
            'protocol = "udp"',
            f"remote_port = {RULE_PORT + number}",
        ]
    return "\n".join(lines) + "\n"


def prefix_address(entry: int) -> int:
    """Return the network address of a prefix."""
    return PREFIX_BASE + (entry << 8)


def prefix_length(entry: int) -> int:
    """Return the length of a prefix."""
    return PREFIX_LENGTHS[entry % len(PREFIX_LENGTHS)]


def classid(class_number: int) -> str:
    """Return the leaf of a class in our HTB tree (policy/plan.py)."""
    return f"{TREE}{0x100 * (class_number + 1):x}"


def has_hashed(job: Job) -> bool:
    """Return whether people would spread the filters of this job over buckets."""
    return max(job.prefixes, job.rules if job.curve == "rules" else 0) > RULES


def filter_lines(classifier: str, job: Job) -> Iterator[str]:
    """Yield the `tc -batch` lines that do a job; `DEV` stands for the device."""
    start = f"filter add DEV parent {TREE} protocol ip prio"
    if classifier == U32_HASHED:
        # The third byte of the address; the lower byte of the destination port.
        key = "0x0000ff00 at 16" if job.prefixes else "0x000000ff at 20"
        yield f"{start} 1 handle 1: u32 divisor 256"
        yield f"{start} 1 u32 ht 800:: match u32 0 0 at 0 hashkey mask {key} link 1:"
    for entry in range(job.prefixes or job.rules):
        leaf = classid(entry % job.classes)
        address = socket.inet_ntoa(prefix_address(entry).to_bytes(4, "big"))
        network, port = f"{address}/{prefix_length(entry)}", RULE_PORT + entry
        if classifier == FLOWER:
            what = f"dst_ip {network}" if job.prefixes else f"ip_proto udp dst_port {port}"
            yield f"{start} 1 flower {what} classid {leaf}"
            continue
        what = (
            f"match ip dst {network}"
            if job.prefixes
            else f"match ip protocol 17 0xff match ip dport {port} 0xffff"
        )
        if classifier == U32_HASHED:
            bucket = entry & 0xFF if job.prefixes else port & 0xFF
            yield f"{start} 1 u32 ht 1:{bucket:x}: {what} flowid {leaf}"
        else:
            table = 1 + entry // FILTERS_PER_TABLE
            yield f"{start} {table} u32 {what} flowid {leaf}"
