# SPDX-License-Identifier: Apache-2.0
"""The scale curves: what a packet costs by prefixes, flows, rules and classes.

Packets leave through a veth device under our HTB tree, sent by AF_PACKET, so
that the kernel does for them what it does for any packet that leaves. Each
point is measured in the same tree with our program, without any classifier,
and with cls_u32 and cls_flower at the tree's root doing the same job; the cost
is the difference to the run without. Before it is timed, each classifier must
have put each packet into the right class.
"""

from __future__ import annotations

import collections
import itertools
import math
import os
import platform
import re
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from shapeagent.kernel import qdisc
from shapeagent.kernel.abi import SHP_F_LPM4_REMOTE
from shapeagent.kernel.datapath import Datapath
from shapeagent.kernel.lists import ListTables, prefix_key
from shapeagent.kernel.maps import FLOW_ENTRIES, PinnedMaps
from shapeagent.kernel.netns import open_rtnl, run_in_netns
from shapeagent.kernel.probe import read_possible_cpus
from shapeagent.lab.bench.curves_jobs import (
    FIRST_FLOW,
    FLOWER,
    POINTS,
    PREFIX_LENGTHS,
    SAMPLE_PACKETS,
    SHAPECTL,
    SHAPECTL_FIRST,
    TREE,
    U32,
    U32_HASHED,
    Job,
    filter_lines,
    has_hashed,
    job_at,
    policy_text,
    prefix_address,
    prefix_length,
    stages_of,
)
from shapeagent.lab.topology import (
    Lab,
    Port,
    private_dirs,
    run_command,
    set_sysctls,
    veth_pair,
)
from shapeagent.model.errors import FailedError, InputError
from shapeagent.model.schema import MAX_RULE_NUMBER, PROTECTED

LINK_BITS_PER_S = 10_000_000_000  # above what one CPU can send: nothing ever waits
# (rounds, packets a round at most): in virtual time two rounds differ by a timer's tick only.
_SIZES: Mapping[str, tuple[int, int]] = {"real": (5, SAMPLE_PACKETS), "virtual": (3, 1_024)}
ROUND_NS = 250_000_000  # a slow classifier gets fewer packets a round
FEWEST_PACKETS = 64
LOAD_CAP_S = 30.0
LOAD_LINES = 2_000
# Our program adds at most 20,000 flows a second to its cache (kernel/abi: insert_limit).
INSERT_CHUNK = 16_384
INSERT_WINDOW_S = 1.1
MOST_RULES = MAX_RULE_NUMBER - len(PROTECTED)

_LISTED = struct.Struct("=QII")  # struct shp_listed
_REMOTE = 1


class AttachPolicy(Protocol):
    """Attaches shapectl with a policy of ours while the context lasts."""

    def __call__(
        self,
        netns: str,
        device: str,
        link_rate_bits_per_s: int,
        *,
        profile: str | None = None,
        hook: str | None = None,
        policy_text: str | None = None,
    ) -> AbstractContextManager[int]:
        """Return the context."""
        ...


def run_curves(
    *,
    attach: AttachPolicy,
    clock: str,
    progress: Callable[[str], None],
    points: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Return `rows`, `left_out` and `facts` of the curves, as docs/performance.md shows them.

    A row has `curve`, `classifier`, `n`, `ns_per_packet` (above the run without a
    classifier), `base_ns_per_packet` (that run), `packets`, `kernel`, `clock`.

    Args:
        clock: `virtual` or `real`, as the caller knows; it goes into the rows.
        points: curve → numbers; None for all.

    Raises:
        InputError: bench-curve-unknown, bench-point-invalid.
        FailedError: a command failed, or a classifier chose a wrong class (bench-wrong-class).

    Effects: two namespaces; gone on return.
    """
    stages = stages_of(POINTS if points is None else points)
    curves: dict[str, Any] = {"rows": [], "left_out": [], "facts": machine_facts(clock)}
    with Lab() as lab:
        here, there = lab.add_namespace(), lab.add_namespace()
        port = Port(here, "a0", "198.18.1.1", "2001:db8:1::1")
        veth_pair(port, Port(there, "b0", "198.18.1.2", "2001:db8:1::2"))
        for namespace in (here, there):  # neighbour discovery would count as packets of ours
            set_sysctls(namespace, {"net.ipv6.conf.all.disable_ipv6": "1"})
        bench = _Bench(port, clock, progress, curves)
        try:
            for jobs in stages:
                bench.run_stage(attach, jobs)
        finally:
            bench.close()
    return curves


def read_cpu_model() -> str:
    """Return the name of this machine's CPU, else its architecture. Source: proc(5), cpuinfo."""
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return cpu[1] if cpu else platform.machine()


def machine_facts(clock: str) -> dict[str, Any]:
    """Return what the figures were measured on."""
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return {
        "kernel": os.uname().release,
        "clock": clock,
        "cpu": read_cpu_model(),
        "cpus": os.cpu_count(),
        "memory_mb": int(memory[1]) // 1024 if memory else None,
        "iproute2": run_command(["tc", "-V"]).removeprefix("tc utility, ").split(",")[0].strip(),
    }


class _Bench:
    """The device under test, a socket to send on, and the figures so far."""

    def __init__(
        self, port: Port, clock: str, progress: Callable[[str], None], curves: dict[str, Any]
    ) -> None:
        self.port = port
        self.clock = clock
        self.progress = progress
        self.curves = curves
        self._missing: set[str] = set()
        self._unseen_flow = FIRST_FLOW
        self._rounds, self._most = _SIZES[clock]
        self._rtnl = open_rtnl(port.namespace)
        self._socket, self._index = run_in_netns(port.namespace, self._open)

    def _open(self) -> tuple[socket.socket, int]:
        # Protocol 0: it sends only, and no packet is cloned for it.
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        raw.bind((self.port.device, 0))
        return raw, socket.if_nametoindex(self.port.device)

    def close(self) -> None:
        self._socket.close()
        self._rtnl.close()

    def run_stage(self, attach: AttachPolicy, jobs: Sequence[Job]) -> None:
        """Measure jobs that share one policy; a policy that is refused gets fewer rules."""
        first = jobs[0]
        text = policy_text(first.classes, first.rules)
        self.progress(f"attach: {first.classes} classes, {first.rules} rules")
        with ExitStack() as stack:
            try:
                stack.enter_context(
                    attach(
                        self.port.namespace,
                        self.port.device,
                        LINK_BITS_PER_S,
                        profile="htb",
                        hook="clsact",  # where it is taken off again, and theirs are put
                        policy_text=text,
                    )
                )
            except InputError as error:
                if first.curve != "rules" or first.rules <= MOST_RULES:
                    raise
                self._leave_out(first, SHAPECTL, "; ".join(error.details) or error.message)
                jobs = ()
            else:
                self._run_attached(jobs)
        if not jobs:
            self.run_stage(attach, [job_at("rules", MOST_RULES)])

    def _run_attached(self, jobs: Sequence[Job]) -> None:
        ours = {job.n: list(self._ours(job)) for job in jobs}
        self._tc("filter", "del", "dev", self.port.device, "egress")
        for job in jobs:
            base = self._time(job, "base")
            for classifier, found in ours[job.n]:
                self._add(job, classifier, found, base)
            for classifier in (U32, U32_HASHED, FLOWER):
                if classifier == U32_HASHED and not has_hashed(job):
                    continue
                with self._filters(job, classifier) as loaded:
                    if loaded:
                        self._check(job, classifier)
                        self._add(job, classifier, self._time(job, classifier), base)

    def _ours(self, job: Job) -> Iterator[tuple[str, tuple[float, int]]]:
        if job.prefixes:
            self.progress(f"{job.curve} {job.n:,}: load our list")
            self._load_list(job)
        for start in range(0, min(job.flows, FLOW_ENTRIES), INSERT_CHUNK):
            time.sleep(INSERT_WINDOW_S)
            self._send_ns([job.frame(flow) for flow in _chunk(job, start)])
        self._check(job, SHAPECTL)
        yield SHAPECTL, self._time(job, SHAPECTL)
        if job.curve in ("prefixes", "rules"):
            samples = []
            for _ in range(self._rounds):
                # The first packets of some flows must not be refused room by those of others.
                time.sleep(INSERT_WINDOW_S)
                start = self._unseen_flow
                self._unseen_flow += self._most
                frames = [job.frame(flow) for flow in range(start, self._unseen_flow)]
                samples.append(self._send_ns(frames))
            yield SHAPECTL_FIRST, (self._typical(samples), self._rounds * self._most)

    def _load_list(self, job: Job) -> None:
        """Put the job's prefixes in force, as the engine does but without its text file."""
        (folder,) = private_dirs(self.port.namespace).bpffs_dir.iterdir()
        tables = ListTables(flags=SHP_F_LPM4_REMOTE)
        turn = math.lcm(len(PREFIX_LENGTHS), job.classes)
        heads = [prefix_key(b"", prefix_length(entry)) for entry in range(turn)]
        values = [
            _LISTED.pack(0, entry % job.classes, prefix_length(entry)) for entry in range(turn)
        ]
        pack = struct.Struct(">I").pack
        tables.of("lpm4", _REMOTE).update(
            (heads[entry % turn] + pack(prefix_address(entry)), values[entry % turn])
            for entry in range(job.prefixes)
        )
        maps = PinnedMaps(folder)
        try:
            Datapath(maps, read_possible_cpus()).replace_lists(tables)
        finally:
            maps.close()

    @contextmanager
    def _filters(self, job: Job, classifier: str) -> Iterator[bool]:
        """Give whether the filters of a job could be loaded; they are gone at the end."""
        if classifier in self._missing:
            self._leave_out(job, classifier, _no_classifier(classifier))
            yield False
            return
        self.progress(f"{job.curve} {job.n:,}: load {classifier}")
        try:
            yield self._load_filters(job, classifier)
        finally:
            self._tc("filter", "del", "dev", self.port.device, "parent", TREE)

    def _load_filters(self, job: Job, classifier: str) -> bool:
        lines = filter_lines(classifier, job)
        total, done = job.prefixes or job.rules, 0
        started_s = time.monotonic()
        while chunk := list(itertools.islice(lines, LOAD_LINES)):
            text = "\n".join(chunk).replace("DEV", f"dev {self.port.device}") + "\n"
            try:
                run_command(["tc", "-n", self.port.namespace, "-batch", "-"], stdin=text)
            except FailedError as error:
                if done or not re.search("not found|Unknown|No such file", error.message):
                    raise
                self._missing.add(classifier)
                self._leave_out(job, classifier, _no_classifier(classifier))
                return False
            done += len(chunk)
            spent_s = time.monotonic() - started_s
            # The first of them also load tc and the module.
            if done < total and spent_s > LOAD_CAP_S / 10 and spent_s * total / done > LOAD_CAP_S:
                self._leave_out(
                    job,
                    classifier,
                    f"tc would need over {LOAD_CAP_S:.0f} s to load {total:,} filters",
                )
                return False
        return True

    def _check(self, job: Job, classifier: str) -> None:
        """Send some packets; raise FailedError unless each reached its class."""
        flows = job.sample(0)[:: SAMPLE_PACKETS // FEWEST_PACKETS]
        expected = job.classes_of(flows)
        before = self._class_packets(job)
        self._send_ns([job.frame(flow) for flow in flows])
        after = self._class_packets(job)
        got = {number: after[number] - before[number] for number in after}
        want = {number: expected[number] for number in after}
        if got != want:
            raise FailedError(
                "bench-wrong-class",
                f"{classifier} with {job.n:,} {job.curve} put packets into wrong classes: "
                f"got {got}, want {want}.",
            )

    def _class_packets(self, job: Job) -> dict[int, int]:
        stats = qdisc.class_stats(self._rtnl, self._index)
        return {number: stats[0x100 * (number + 1)].sent_packets for number in range(job.classes)}

    def _time(self, job: Job, what: str) -> tuple[float, int]:
        """Return the nanoseconds per packet of a typical round, and how many were sent in all."""
        self.progress(f"{job.curve} {job.n:,}: measure {what}")
        few = [job.frame(flow) for flow in job.sample(0)[:: SAMPLE_PACKETS // FEWEST_PACKETS]]
        packets = min(self._most, max(FEWEST_PACKETS, int(ROUND_NS / self._send_ns(few))))
        samples = []
        for turn in range(self._rounds):
            flows = job.sample(turn)[:: SAMPLE_PACKETS // packets][:packets]
            samples.append(self._send_ns([job.frame(flow) for flow in flows]))
        return self._typical(samples), self._rounds * packets

    def _typical(self, samples: Sequence[float]) -> float:
        """Return what a round costs: on a real clock the fastest, since others take time away."""
        return min(samples) if self.clock == "real" else statistics.median(samples)

    def _send_ns(self, frames: Sequence[bytes]) -> float:
        """Send frames; return nanoseconds per packet, of a loop that runs in C."""
        sending = map(self._socket.send, frames)
        started_ns = time.perf_counter_ns()
        collections.deque(sending, 0)
        return (time.perf_counter_ns() - started_ns) / len(frames)

    def _tc(self, *words: str) -> None:
        run_command(["tc", "-n", self.port.namespace, *words])

    def _add(
        self, job: Job, classifier: str, found: tuple[float, int], base: tuple[float, int]
    ) -> None:
        self.curves["rows"].append(
            {
                "curve": job.curve,
                "classifier": classifier,
                "n": job.n,
                "ns_per_packet": round(found[0] - base[0], 1),
                "base_ns_per_packet": round(base[0], 1),
                "packets": found[1],
                "kernel": os.uname().release,
                "clock": self.clock,
            }
        )

    def _leave_out(self, job: Job, classifier: str, reason: str) -> None:
        self.curves["left_out"].append(
            {"curve": job.curve, "classifier": classifier, "n": job.n, "reason": reason}
        )


def _chunk(job: Job, start: int) -> range:
    return range(start, min(job.flows, start + INSERT_CHUNK, FLOW_ENTRIES))


def _no_classifier(classifier: str) -> str:
    return f"this kernel has no cls_{classifier.partition('-')[0]}"
